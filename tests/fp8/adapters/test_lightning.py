"""Lightning, run for real on the CPU: its Trainer under both its names, and its Fabric."""

import importlib
import re
from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import fp8
from fp8.adapters.lightning import FP8FabricPrecision, FP8Precision
from fp8.casts.watch import watch_of
from tests.fp8.adapters.loops import adam, batches, loss_of, plain_loop, small
from tests.shared import (
    Net,
    assert_same,
    parametrize,
    paths,
    pickled,
    proves,
    quietly,
    refuses,
    said,
    theirs,
    tied,
)

with quietly():
    pytest.importorskip("lightning", reason="the library that is adapted")
    import lightning

    bnb = pytest.importorskip("bitsandbytes")


pytestmark = theirs

BITS = ["fp8.optim", "bitsandbytes"]


def logits(m, tokens):
    x = m.embed(tokens)
    x = x + m.attention(m.norm(x), x, x)[0]
    return m.head(m.frozen(x + m.down(nn.functional.gelu(m.up(x)))))


def net():
    """What Lightning's own conversion loses: a tie, a frozen layer, a norm without weight, a
    layer of an odd size before others, attention."""
    return tied(
        Net(
            logits,
            embed=nn.Embedding(32, 32),
            attention=nn.MultiheadAttention(32, 2, batch_first=True),
            norm=nn.LayerNorm(32, elementwise_affine=False),
            up=nn.Linear(32, 24),
            down=nn.Linear(24, 32),
            frozen=nn.Linear(32, 32).requires_grad_(False),
            head=nn.Linear(32, 32, bias=False),
        )
    )


OPTIMIZERS = {
    "torch": adam,
    "fp8.optim": lambda net: fp8.optim.AdamW(net.parameters(), lr=1e-2, min_size=0),
    "bitsandbytes": lambda net: bnb.optim.AdamW8bit(net.parameters(), lr=1e-2),
}


def module(library, net, optimizer="torch"):
    """A LightningModule around ``net``, of that library."""

    class Lit(importlib.import_module(library).LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net
            self.losses = []
            self.seen = []

        def training_step(self, batch, index):
            loss = loss_of(self.net, batch)
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch, index):
            self.seen.append(loss_of(self.net, batch).item())

        test_step = predict_step = validation_step

        def configure_optimizers(self):
            return OPTIMIZERS[optimizer](self.net)

    return Lit()


def trainer(library, plugin, folder, epochs, **options):
    return importlib.import_module(library).Trainer(
        plugins=plugin,
        accelerator="cpu",
        max_epochs=epochs,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"enable_checkpointing": False, "gradient_clip_val": 1.0, **options},
    )


def loader():
    return DataLoader(batches(), batch_size=None)


DTYPES = {"32-true": None, "16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}


@proves(
    "Lightning",
    "precision=32",
    "precision=16, with a scaled loss",
    "precision=bf16",
    "no casts by hand",
    "bf16 on CPU",
    "the 8-bit optimizer of bitsandbytes",
    how="library",
)
@parametrize(
    "library, optimizer, precision",
    [
        *(("lightning", "torch", precision) for precision in DTYPES),
        ("pytorch_lightning", "torch", "32-true"),
        *(("lightning", name, "bf16-mixed") for name in BITS),
    ],
)
def test_the_same_losses_as_a_plain_loop(library, optimizer, precision, tmp_path):
    inner = net()
    other = fp8.convert(deepcopy(inner), "tensor")
    lit = module(library, inner, optimizer)
    plugin = FP8Precision("tensor", precision=precision, library=library)
    trainer(library, plugin, tmp_path, 2).fit(lit, loader())
    stepping, dtype = OPTIMIZERS[optimizer](other), DTYPES[precision]
    assert lit.losses == plain_loop(other, stepping, batches() * 2, dtype=dtype)
    assert lit.losses[-1] < lit.losses[0]


STATES = ["delayed", "static", fp8.Policy("row", switch=[(0.4, "delayed")])]


def fitted(recipe, folder, epochs=2, precision="32-true", **options):
    """A module with layers of one product and of several, and the Trainer that has trained it."""
    torch.manual_seed(0)
    lit = module("lightning", net())
    plugin = FP8Precision(recipe, precision=precision)
    run = trainer("lightning", plugin, folder, epochs, **options)
    run.fit(lit, loader())
    return lit, run


@parametrize(
    "recipe, precision",
    [("static", "32-true"), (STATES[2], "32-true"), ("delayed", "bf16-mixed")],
)
def test_what_follows_a_fit(recipe, precision, tmp_path):
    """Each call of a Trainer that loads weights into a model that is trained already; and training
    resumed to the bit, in that model and in a new one, as if it had not stopped."""
    how = {"precision": precision, "enable_checkpointing": True}
    lit, run = fitted(recipe, tmp_path, **how)
    assert not any("fp8" in name for name in lit.state_dict())
    state = {name: value.clone() for name, value in lit.named_buffers()}
    lit.load_state_dict(lit.state_dict())
    assert state
    assert_same(dict(lit.named_buffers()), state)
    best = run.checkpoint_callback.best_model_path
    for call in (run.validate, run.test):
        call(lit, loader(), ckpt_path="best", verbose=False)
    run.predict(lit, loader(), ckpt_path="best")
    models = [fitted(recipe, tmp_path, 4, **how)[0]] if isinstance(recipe, str) else []
    # A switch comes later in a longer training.
    for model in (lit, module("lightning", net())):
        plugin = FP8Precision(recipe, precision=precision)
        trainer("lightning", plugin, tmp_path, 4).fit(model, loader(), ckpt_path=best)
        models.append(model)
    weights = models[0].state_dict()
    for model in models[1:]:
        assert model.losses[-8:] == models[0].losses[-8:]
        assert_same(model.state_dict(), weights)
        assert watch_of(model).schedule == watch_of(models[0]).schedule


@parametrize("recipe", ["unit", "static"])
def test_checkpoints_are_those_of_the_plain_model(recipe, tmp_path):
    """Whose weights may be in 16 bits."""
    lit = module("lightning", small())
    where = lambda name, _: "up" not in name  # noqa: E731
    plugin = FP8Precision(recipe, precision="bf16-true", where=where)
    run = trainer("lightning", plugin, tmp_path, 1)
    run.fit(lit, loader())
    assert {p.dtype for p in lit.parameters()} == {torch.bfloat16}
    assert paths(fp8.report(lit), "left alone") == {"net.embed", "net.up"}
    run.save_checkpoint(tmp_path / "checkpoint.ckpt")
    saved = torch.load(tmp_path / "checkpoint.ckpt", weights_only=True)
    module("lightning", small()).load_state_dict(saved["state_dict"])  # strict
    assert saved["FP8Precision"]["fp8"]["recipe"]["name"] == recipe
    histories = saved["FP8Precision"]["fp8"]["histories"]
    assert bool(histories) == (recipe != "unit")
    assert all(bool((history > 0).any()) for history in histories.values())


POLICY = fp8.Policy(
    "tensor", rules=[("*.head", "grad_weight", None)], switch=[(0.4, "bf16")]
)


def test_a_policy_and_its_switch(tmp_path):
    """From the fifth of 8 steps on: the first with at least 0.4 of them done."""
    net = small()
    other = fp8.convert(nn.ModuleDict({"net": deepcopy(net)}), POLICY)
    done = iter(range(8))

    def advance(*_):
        fp8.advance(other, next(done) / 8)

    other["net"].register_forward_pre_hook(advance)
    want = plain_loop(other["net"], adam(other["net"]), batches() * 2)
    lit = module("lightning", deepcopy(net))
    trainer("lightning", FP8Precision(POLICY), tmp_path, 2).fit(lit, loader())
    assert lit.losses == want
    assert "since 0.4" in str(fp8.report(lit))
    never = fp8.Policy(POLICY.recipe, rules=POLICY.rules)
    plain = fp8.convert(nn.ModuleDict({"net": deepcopy(net)}), never)["net"]
    assert plain_loop(plain, adam(plain), batches() * 2) != want


@parametrize(
    "first, second, message",
    [
        ("unit", "tensor", "under the recipe 'unit', goes on under 'tensor'"),
        (POLICY, "row", "under the recipe 'a policy of tensor'.* 'row'"),
        (POLICY, POLICY, None),
    ],
)
def test_another_recipe_is_said(first, second, message, tmp_path):
    lit = module("lightning", small())
    run = trainer("lightning", FP8Precision(first), tmp_path, 1)
    run.fit(lit, loader())
    run.save_checkpoint(tmp_path / "checkpoint.ckpt")
    run = trainer("lightning", FP8Precision(second), tmp_path, 2)
    with said() as messages:
        run.fit(lit, loader(), ckpt_path=tmp_path / "checkpoint.ckpt")
    found = [text for text in messages if "the checkpoint was trained" in text]
    assert len(found) == (message is not None)
    assert all(re.search(message, text) for text in found)


def fabric_loop(fabric, model, optimizer, max_norm=None):
    """The losses of a loop in Fabric; max_norm: to which gradients are clipped."""
    losses = []
    for tokens in batches():
        loss = loss_of(model, tokens)
        losses.append(loss.item())
        optimizer.zero_grad()
        fabric.backward(loss)
        if max_norm is not None:
            fabric.clip_gradients(model, optimizer, max_norm=max_norm)
        optimizer.step()
    return losses


@parametrize("recipe, precision", [("unit", "16-mixed"), ("delayed", "32-true")])
def test_fabric(recipe, precision):
    """A root that is a layer itself among what it sets up."""
    net = small()
    other = fp8.convert(deepcopy(net), recipe)
    plugin = FP8FabricPrecision(recipe, precision=precision)
    fabric = lightning.Fabric(plugins=plugin, accelerator="cpu")
    model, optimizer = fabric.setup(net, adam(net))
    losses = fabric_loop(fabric, model, optimizer, max_norm=1.0)
    # Fabric's autocast is around the forward pass alone, and its output is float32.
    tolerance = 0 if precision == "32-true" else 0.02
    want = plain_loop(other, adam(other), batches(), dtype=DTYPES[precision])
    assert losses == pytest.approx(want, rel=tolerance, abs=0)
    layer = nn.Linear(32, 32)
    assert fp8.report(fabric.setup(layer).module)[0].done == "converted"


def test_mixed_precision_is_that_of_a_device_that_is_there(monkeypatch):
    """Torch built for CUDA names it without a GPU too, unless it is asked whether there is one."""

    def built_for_cuda(check_available=False):
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", built_for_cuda)
    with FP8Precision("unit", precision="bf16-mixed").forward_context():
        assert torch.is_autocast_enabled("cpu")


@parametrize("make", [FP8Precision, FP8FabricPrecision])
def test_pickled(make):
    """Processes that are spawned get it by pickle."""
    plugin = make("block", precision="bf16-mixed", device="cpu")
    other = pickled(plugin)
    assert type(other) is type(plugin)
    assert other.recipe == plugin.recipe
    assert other.precision == "bf16-mixed"


def test_bad_input():
    for precision in ("fp8", 16, "bf16", None, []):  # Lightning's short forms are named
        with refuses("unknown precision .*'16-mixed', 'bf16-mixed'"):
            FP8Precision("unit", precision=precision)
    with refuses("unknown library 'keras'"):
        FP8Precision("unit", library="keras")
    with refuses("recipe"):
        FP8Precision("unknown")
    with refuses("backend"):
        FP8Precision("unit", backend="unknown")
    fabric = lightning.Fabric(plugins=FP8Precision("unit"), accelerator="cpu")
    with refuses("for Linear take FP8FabricPrecision", TypeError):
        fabric.setup(nn.Linear(16, 16))
    with refuses("device", TypeError):
        FP8Precision("unit", device="cpu")
