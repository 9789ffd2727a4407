"""What unit_scale computes: the same as the model written by hand with uu and U."""

from __future__ import annotations

import copy
import math
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import fp8
import unit_scaling as uu
import unit_scaling.functional as U
from tests.transforms.models import GPT, Net, OfLayer, batch, gpt, own, plan_of, rms
from unit_scaling.optim import lr_scale_func_adam
from unit_scaling.parameter import tag
from unit_scaling.transforms import simulate_fp8, unit_scale

attention = F.scaled_dot_product_attention


@pytest.mark.proves("unit-scaling", "the unit-scaled MLP", how="own")
def test_mlp_is_the_hand_written_one() -> None:
    torch.manual_seed(0)
    model = unit_scale(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 8)).double())
    x = torch.randn(32, 16, requires_grad=True, dtype=torch.float64)
    h = F.gelu(F.linear(x, model[0].weight, model[0].bias) / 4)
    expected = F.linear(h, model[2].weight, model[2].bias) / 64
    y = model(x)
    torch.testing.assert_close(y, expected, rtol=1e-14, atol=1e-14)
    g = torch.randn_like(y)
    ours, theirs = (torch.autograd.grad(e, (x, *model.parameters()), g) for e in (y, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.proves("unit-scaling", "unit_scale(model)", how="own")
@pytest.mark.proves("the field", "unit scaling", how="own")
def test_every_operand_has_unit_scale() -> None:
    torch.manual_seed(0)
    model = unit_scale(GPT(width=128, heads=2))
    ids = torch.randint(0, 65, (8, 64))
    found = uu.verify(model, (ids, ids.roll(-1, 1)))
    assert {kind: found.share(kind) for kind in ("activation", "weight", "gradient")} == {
        "activation": 1.0,
        "weight": 1.0,
        "gradient": 1.0,
    }
    for name, p in model.named_parameters():
        assert p.dim() == 1 or rms(p) == pytest.approx(1, abs=1e-5), name


def test_a_recurrence_keeps_the_factor_of_its_rule() -> None:
    """Divided by the size of its state, its gain makes it chaotic: a GRU ended at .74 for .51."""

    def forward(m: Any, x: Tensor) -> Tensor:
        state = x.new_zeros(8, 64)
        for now in x.unbind(1):
            state = 0.1 * torch.tanh(m.enter(now) + m.again(state))
        return m.head(state)

    torch.manual_seed(0)
    layers = {"enter": nn.Linear(4, 64), "again": nn.Linear(64, 64), "head": nn.Linear(64, 64)}
    model = unit_scale(Net(forward, **layers))
    model(torch.randn(8, 6, 4))
    steps = {place[0]: step for place, (step,) in plan_of(model).steps.items() if step}
    factors = {path: step.factor for path, step in steps.items() if path}
    assert factors == {"enter": 1 / 2, "again": 1 / 8, "head": 16 / 64}
    assert dict(steps["again"].static) == dict(steps["head"].static) == {(0,): -4}


def test_constant_weights_are_left_with_a_row() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1), nn.Linear(1, 1))
    nn.init.ones_(model[0].weight)
    model = unit_scale(model)
    assert torch.equal(model[0].weight, torch.ones(8, 8))
    assert model(torch.randn(4, 8)).isfinite().all()
    alone = {(row.path, row.why) for row in uu.report(model).left_alone}
    assert alone == {("0", "is 1 everywhere")}


@pytest.mark.parametrize("start", ["noise", "forget gate", "rare class", "few classes", "one"])
def test_a_bias_with_a_mean_that_is_set_keeps_its_values(start: str) -> None:
    """Others are noise around zero. A Mamba ended at 2.24 for 2.13 without its time steps."""
    torch.manual_seed(0)
    layer = nn.Linear(16, {"one": 1, "few classes": 4}.get(start, 64))
    with torch.no_grad():
        if start == "forget gate":
            layer.bias[:16] += 1
        if start in ("rare class", "few classes", "one"):
            layer.bias.fill_(-4.6)
    model = unit_scale(nn.Sequential(layer, nn.ReLU()))
    kept = start in ("forget gate", "rare class", "few classes")
    assert torch.equal(model[0].bias, layer.bias if kept else torch.zeros_like(layer.bias))
    done = {row.done for row in uu.report(model) if row.call == "bias"}
    assert done == {"unchanged" if kept else "set to zero"}


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_a_layer_without_outputs_and_a_bias_without_dimensions() -> None:
    net = Net(lambda m, x: m.layer(x) + m.bias, layer=nn.Linear(4, 0))
    net.bias = nn.Parameter(torch.tensor(0.5))
    assert unit_scale(net)(torch.ones(2, 4)).shape == (2, 0)


@pytest.mark.parametrize("inputs", [1, 8, 15, 16, 64])
def test_biases_of_few_inputs_are_divided_as_the_result(inputs: int) -> None:
    """There they are no small part of it: features of one input differ by them. Once."""
    torch.manual_seed(0)
    plain = nn.Linear(inputs, 64)
    model = unit_scale(unit_scale(nn.Sequential(plain, nn.ReLU())))
    x = torch.randn(256, inputs)
    expected = plain(x) if inputs < 16 else plain(x) - plain.bias
    result = F.linear(x, model[0].weight * inputs**-0.5, model[0].bias)
    torch.testing.assert_close(result * (rms(plain.weight) * inputs**0.5), expected)


READS_OF_GAINS = {
    "multiplied": ((32,), lambda m, x: m.gain * m.layer(x), True),
    "of a residual branch": ((32,), lambda m, x: m.layer(x + m.gain * m.layer(x)), True),
    "of two dimensions": ((1, 32), lambda m, x: m.gain * m.layer(x), True),
    "of three dimensions": ((1, 1, 32), lambda m, x: m.gain * m.layer(x), True),
    "of a norm": ((32,), lambda m, x: F.rms_norm(m.layer(x), (32,), m.gain), True),
    "one plus it": ((32,), lambda m, x: m.layer(x) * (1 + m.gain), False),
    "of a formula": ((32,), lambda m, x: m.layer(x) * (m.gain * m.gain).sum().exp(), False),
    "in two ways": ((32,), lambda m, x: m.gain * m.layer(x) + m.gain.exp(), False),
}


@pytest.mark.parametrize("name", READS_OF_GAINS)
def test_a_gain_that_multiplies_values_alone_starts_at_one(name: str) -> None:
    """Whatever its shape (vit-pytorch's are (1, 1, n), torchvision's (n, 1, 1)). One that does more
    keeps its values."""
    shape, forward, scaled = READS_OF_GAINS[name]
    model = Net(forward, layer=nn.Linear(32, 32))
    model.gain = nn.Parameter(torch.full(shape, 0.02))
    ours = unit_scale(model)
    ours(torch.randn(64, 32))
    torch.testing.assert_close(ours.gain.detach(), torch.full(shape, 1.0 if scaled else 0.02))
    assert not scaled or ours.gain.mup_type == "norm"
    assert not uu.report(ours).left_alone
    kept = [row.call for row in uu.report(ours) if row.done == "keeps its values"]
    assert kept == ([] if scaled else ["gain"])


def _beside(m: Any, x: Tensor) -> Tensor:
    return m.head(torch.cat([m.added.expand(len(x), -1, -1), m.layer(x)], 1))


READS: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "positions": (lambda m, x: m.head(m.layer(x) + m.added[:, :6]), "bias"),
    "positions of large values": (lambda m, x: m.head(64 * m.layer(x) + m.added), "bias"),
    "class token": (_beside, "bias"),
    "mask token": (lambda m, x: m.head(torch.where(x > 0, m.layer(x), m.added)), "bias"),
    "bias of attention": (
        lambda m, x: m.head(F.scaled_dot_product_attention(*[m.layer(x)] * 3, m.added[..., :6])),
        "bias",
    ),
    "positions and logits": (lambda m, x: (m.layer(x) + m.added) @ m.added.mT, "weight"),
}


@pytest.mark.parametrize("start", [0.0, 0.02])
@pytest.mark.parametrize("name", READS)
def test_what_is_added_to_values_learns_as_a_bias(name: str, start: float) -> None:
    """By its own size, its rate is too low to reach that of the values: a DiT ended at .76 for .35,
    as its positions did not learn."""
    torch.manual_seed(0)
    forward, kind = READS[name]
    net = Net(forward, layer=nn.Linear(16, 16, bias=False), head=nn.Linear(16, 4, bias=False))
    net.added = nn.Parameter(start * torch.randn(1, 6, 16))
    model = unit_scale(net)
    optimizer = uu.optim.AdamW(model.parameters(), lr=0.5)
    (model(torch.randn(8, 6, 16)) - 1).square().sum().backward()
    assert model.added.mup_type == kind
    torch.testing.assert_close(model.added.detach(), net.added.detach())
    optimizer.step()
    if kind == "bias":
        size = 64 if "large" in name else 1
        change = (model.added - net.added).abs().max().item()
        assert change == pytest.approx(0.5 / 32 * size, rel=0.01)


def test_tags_and_optimizer() -> None:
    torch.manual_seed(0)
    model = unit_scale(nn.Sequential(nn.Linear(16, 8), nn.LayerNorm(8), nn.Linear(8, 4)))
    tags = {name: p.mup_type for name, p in model.named_parameters()}
    assert tags == {
        "0.weight": "weight",
        "0.bias": "bias",
        "1.weight": "norm",
        "1.bias": "bias",
        "2.weight": "output",
        "2.bias": "bias",
    }
    optimizer = uu.optim.AdamW(model.parameters(), lr=1.0)
    rates = dict(zip(tags, optimizer.param_groups[0]["mup_lr_scales"], strict=True))
    assert rates["0.weight"] == pytest.approx(1 / math.sqrt(16))
    assert rates["2.weight"] == uu.optim.LR_MULT["adam"]["output"]


def test_weights_that_keep_their_values_have_one_relative_rate() -> None:
    """The last linear layer too."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    for layer in plain:
        prune.random_unstructured(layer, "weight", amount=0.1)
    model = unit_scale(plain)
    model(torch.randn(64, 64)).square().mean().backward()
    weights = [p for p in model.parameters() if p.dim() > 1]
    before = [p.detach().clone() for p in weights]
    uu.optim.AdamW(model.parameters(), lr=0.25).step()
    changes = [rms(p - b) / p.mup_scale for p, b in zip(weights, before, strict=True)]
    assert max(changes) / min(changes) < 1.2


def test_biases_of_small_weights_that_keep_their_values_do_not_outweigh_them() -> None:
    """The add divides such a branch by its RMS, and with it what a bias changes: masked flows with
    blocks that start near the identity diverged."""
    torch.manual_seed(0)
    branch, head = nn.Linear(64, 64), nn.Linear(64, 4)
    nn.init.uniform_(branch.weight, -1e-3, 1e-3)
    prune.random_unstructured(branch, "weight", amount=0.5)
    model = unit_scale(Net(lambda m, x: m.head(x + m.branch(x)), branch=branch, head=head))
    x = torch.randn(64, 64)
    optimizer = uu.optim.AdamW(model.parameters(), lr=0.25)
    before = model(x)
    before.square().mean().backward()
    model.branch.weight_orig.grad = model.head.weight.grad = None
    optimizer.step()
    assert rms(model(x) - before) < 0.1 * rms(before)


def test_rates_of_stacked_experts_are_those_of_one() -> None:
    experts, single = Net(lambda m, x: x), nn.Parameter(torch.empty(16, 32))
    experts.up = nn.Parameter(torch.randn(3, 16, 32))
    experts.up_bias = nn.Parameter(torch.randn(3, 32))
    model = unit_scale(nn.Sequential(nn.Linear(8, 16), experts, nn.Linear(16, 4)))
    up = model[1].up
    tag(single, "weight", mup_scale=up.mup_scale)
    assert [p.mup_stacked for p in (up, model[0].weight)] == [True, False]
    assert lr_scale_func_adam(up) == lr_scale_func_adam(single)
    assert model[1].up_bias.mup_type == "bias"


def test_a_last_layer_inside_a_residual_branch_is_no_readout() -> None:
    torch.manual_seed(0)
    model = unit_scale(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True))
    assert model.linear2.weight.mup_type == "output"
    y = model(torch.randn(2, 8, 32))
    assert model.linear2.weight.mup_type == "weight"
    assert not [r for r in uu.report(model) if r.why.startswith("readout")]
    assert [r.path for r in uu.report(model) if r.done == "tagged as weight"] == ["linear2"]
    assert y.isfinite().all()


LAST: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Tensor], Tensor]]] = {
    "lstm": (lambda: nn.LSTM(32, 32, batch_first=True), lambda m, x: m.head(m.body(x)[0])),
    "cnn": (lambda: nn.Conv1d(32, 32, 3, padding=1), lambda m, x: m.head(m.body(x).mT)),
    "embedding": (lambda: nn.Embedding(16, 32), lambda m, x: m.head(m.body(x))),
}


@pytest.mark.parametrize("kind", LAST)
def test_the_only_linear_layer_is_the_readout_after_layers_with_weights(kind: str) -> None:
    """A linear layer on an embedding alone is a table of logits, none of which is a hidden one."""
    torch.manual_seed(0)
    body, forward = LAST[kind]
    readout = kind != "embedding"
    model = unit_scale(Net(forward, body=body(), head=nn.Linear(32, 8)))
    y = model(torch.randn(64, 32, 32) if readout else torch.randint(16, (64, 32)))
    assert model.head.weight.mup_type == ("output" if readout else "weight")
    said = [row.why for row in uu.report(model) if (row.path, row.call) == ("head", "linear")]
    assert [why.startswith("readout: 1/fan_in") for why in said] == [readout]
    expected = 32**-0.5 if readout else 1.0  # of inputs of RMS 1
    assert expected / 2 < rms(y) < 2 * expected


@pytest.mark.parametrize(("other", "inplace"), [(U.gelu, True), (torch.relu, False)])
def test_replace(other: Callable[..., Tensor], inplace: bool) -> None:
    """`nn.ReLU` gives inplace= by name, which a replacement need not know."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=inplace))
    model, x = unit_scale(net, replace={F.relu: other}), torch.randn(4, 8)
    expected = other(U.linear(x, model[0].weight, model[0].bias, constraint=None))
    for run in (model, pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(run(x), expected)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected)
    assert [r.done for r in uu.report(model) if r.call == "relu"] == ["replaced"]


def test_what_an_autograd_function_computes_is_left_alone() -> None:
    """It computes its gradient itself too."""
    negated = own(lambda x: -(x @ torch.eye(x.shape[-1])), lambda g, x: -g)
    net = Net(lambda m, x: torch.cumprod(torch.special.i1(negated(x)), -1))
    model = unit_scale(nn.Sequential(nn.Linear(8, 8), net))
    model(torch.randn(4, 8))
    (row,) = uu.report(model).left_alone
    assert (row.path, row.call) == ("1", "matmul")
    assert re.match(r"inside the autograd function Function.*_scale.py:\d+", row.why)


def test_a_layer_that_enters_an_autograd_function_later_is_warned_of() -> None:
    """Its factor is none of that function's backward pass. Without gradients nobody looks."""

    def forward(m: Any, x: Tensor) -> Tensor:
        if m.training:
            return OfLayer.apply(m.up(x), m.down.weight, m.down)
        return m.down(m.up(x))

    plain = Net(forward, up=nn.Linear(8, 8), down=nn.Linear(8, 4, bias=False))
    first = unit_scale(plain.train())
    first(x := torch.randn(4, 8))
    model = unit_scale(plain.eval())
    for _ in range(2):
        model(x)
        with torch.no_grad():
            model.train()(x)
        model.eval()
    with pytest.warns(fp8.warnings.ScaleWarning, match="linear in down .* function OfLayer, which"):
        model.train()(x)


def test_a_checkpoint_of_a_function_is_refused() -> None:
    """The plan is not in force where it is computed again."""
    plain = Net(lambda m, x: checkpoint(lambda y: m.a(y) @ y, x, use_reentrant=False))
    plain.a = nn.Linear(8, 8)
    with pytest.raises(ValueError, match=r"_scale.py:\d+ runs under torch.utils.checkpoint"):
        unit_scale(plain)(torch.randn(8, 8))


def test_an_operand_that_is_far_from_unit_scale_is_measured() -> None:
    """The product that reads it brings its result to RMS 1 by a power of two."""
    large = Net(lambda m, x: 300 * x.abs().cumsum(-1))
    model = unit_scale(nn.Sequential(nn.Linear(64, 256), large, nn.Linear(256, 256)))
    y = model(torch.randn(64, 64))
    (row,) = (row for row in uu.report(model) if (row.path, row.call) == ("2", "linear"))
    assert row.why.startswith("readout: 1/fan_in, argument 0 cast at scale ")
    assert 256**-0.5 / 2 < rms(y) < 2 * 256**-0.5


def test_report_counts_every_weight_and_call() -> None:
    model = unit_scale(gpt())
    assert model.head.weight.mup_type == "weight"  # it is tied
    assert "not run yet" in str(uu.report(model))
    model(*batch())
    report = uu.report(model)
    assert not report.left_alone
    weights = sum(p.dim() > 1 for p in model.parameters())
    assert sum(row.done == "unit scale" for row in report) == weights
    # 2 blocks of 4 linear layers and 2 adds, and the head; 2 embeddings, 2 times attention
    assert sum(row.done == "scaled" for row in report) == 2 * 6 + 1
    unchanged = [row.call for row in report if row.done == "unchanged"]
    assert sorted(unchanged) == sorted(["embedding", "scaled_dot_product_attention"] * 2)
    assert "blocks.1.down" in str(report)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: unit_scale("model"), TypeError, "needs an nn.Module, got str"),
        (lambda: unit_scale(nn.Linear(2, 2), {rms: rms}), ValueError, "not a torch function"),
        (lambda: unit_scale(nn.Linear(2, 2), {F.relu: "gelu"}), TypeError, "must be callable, got"),
        (lambda: uu.report(nn.Linear(2, 2)), ValueError, "report needs a model with unit_scale"),
    ],
)
def test_bad_input(call, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        call()


def test_the_first_call_needs_values() -> None:
    """A plan made on the meta device would know no sizes; later calls may be there."""
    model = unit_scale(nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2)))
    with pytest.raises(RuntimeError, match="none on the meta device: call it once where"):
        copy.deepcopy(model).to("meta")(torch.empty(3, 8, device="meta"))
    model(torch.randn(3, 8))
    assert model.to("meta")(torch.empty(3, 8, device="meta")).shape == (3, 2)


def test_recurrent_layers_are_simulated_without_a_warning() -> None:
    """Torch's kernel hides its products, and a warning says so; what takes its place does not."""
    x = torch.randn(5, 3, 8)
    with pytest.warns(UserWarning, match="lstm stays in high precision"):
        simulate_fp8(nn.LSTM(8, 8))(x)
    for model in (simulate_fp8(unit_scale(nn.LSTM(8, 8))), unit_scale(simulate_fp8(nn.LSTM(8, 8)))):
        first, second = model(x)[0], model(x)[0]  # warnings are errors here
        assert torch.equal(first, second)


def test_a_weight_that_no_call_reads_has_one_row():
    model = Net(lambda m, x: m.read(x), read=nn.Linear(4, 4), unread=nn.Linear(4, 4))
    scaled = unit_scale(model)
    scaled(torch.randn(2, 4))
    torch.testing.assert_close(scaled.unread.weight, model.unread.weight)
    done = [r.done for r in uu.report(scaled) if (r.path, r.call) == ("unread", "weight")]
    assert done == ["keeps its values"]


def test_layers_of_uu_are_left_as_they_are() -> None:
    """Their weights, kinds and depths; calls of theirs are no calls without a rule."""
    torch.manual_seed(0)
    stack = uu.DepthSequential(uu.Linear(16, 16), nn.Sequential(uu.LayerNorm(16), uu.GELU()))
    plain = nn.Sequential(nn.Linear(16, 16), stack, uu.LinearReadout(16, 4)).double()
    model = unit_scale(plain)
    x = torch.randn(64, 16, dtype=torch.float64)
    hidden = model[0](x)
    torch.testing.assert_close(model(x), plain[1:](hidden))
    assert {row.path for row in uu.report(model)} <= {"", "0"}
    assert not uu.report(model).left_alone
    for before, after in zip(plain[1:].parameters(), model[1:].parameters(), strict=True):
        assert torch.equal(before, after)
        assert (before.mup_type, before.mup_scaling_depth) == (
            after.mup_type,
            after.mup_scaling_depth,
        )


@pytest.mark.parametrize("fast", [False, True])
def test_a_projection_of_attention_has_the_size_of_its_own_operand(fast: bool) -> None:
    """That of the query changes no factor of keys and values."""
    torch.manual_seed(0)
    plain, x = nn.MultiheadAttention(16, 2, batch_first=True), torch.randn(4, 6, 16)
    plans, results = [], []
    for size in (1.0, 1 / 16):
        model = unit_scale(plain)
        model(size * x, x, x)
        steps = plan_of(model).steps
        plans.append(
            [step for (_, kind, _), each in steps.items() if kind == "linear" for step in each]
        )
        if fast:
            model = torch.compile(model, backend="aot_eager", fullgraph=True)
        results.append(model(size * x, x, x)[0])
    (query, *others), (small, *same) = plans
    assert len(others) == 3
    assert others == same
    assert small.factor == 16 * query.factor
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("layer", [0, 2])
def test_a_weight_of_zeros_takes_the_steps_of_others(layer: int) -> None:
    """It has its factor, without which its learning rate is too high, a readout's by the width."""
    width, steps = 256, []
    for zeros in (False, True):
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, 4, bias=False))
        if zeros:
            nn.init.zeros_(plain[layer].weight)
        model, x = unit_scale(plain), torch.randn(64, width)
        optimizer = uu.optim.AdamW(model.parameters())
        before = model[0](x) if layer == 0 else model(x)
        F.cross_entropy(model(x), torch.arange(64) % 4).backward()
        optimizer.step()
        after = model[0](x) if layer == 0 else model(x)
        steps.append((after - before).square().mean().sqrt())
        assert not uu.report(model).left_alone
    assert 0.5 < steps[1] / steps[0] < 2
