"""The norms of a model in low precision, and back. What Composer's surgery loses is named where the
test is about it."""

import pytest
import torch
from torch import nn

import fp8
from fp8.training.low_precision_norms import PRECISIONS
from tests.shared import (
    Net,
    assert_same,
    by_path,
    normal,
    parametrize,
    paths,
    proves,
    refuses,
    warns,
)

D = 8


class HandMade(nn.Module):
    """A norm as models spell it themselves."""

    def forward(self, x):
        return x / x.square().mean(-1, keepdim=True).sqrt()


HandMade.__name__ = "LlamaRMSNorm"


class Renamed(nn.LayerNorm):
    """A subclass that keeps the forward."""


class Permuting(nn.LayerNorm):
    """timm's LayerNorm2d: a LayerNorm for Composer's surgery, which takes its permutation away."""

    def forward(self, x):
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


def forward(m, x):
    """x: (n, D)."""
    x = m.frozen(m.norm(m.first(x)))
    x = m.unbiased(m.plain(m.again(x)))
    x = m.rms(m.renamed(x))
    x = m.image(m.group(x)[..., None])[..., 0]
    return m.last(m.batch(m.permuting(m.own(x))))


def low(model, precision=None):
    """The model, with norms of every type in low precision."""
    return fp8.apply_low_precision_layernorm(
        model, precision, where=lambda name, norm: True
    )


def norms_of(model):
    """The rows of its report for norms."""
    return [row for row in fp8.report(model) if "Linear" not in row.what]


CHANGED = "norm frozen plain unbiased renamed rms group image".split()


@pytest.fixture
def model():
    norm = nn.LayerNorm(D, eps=1e-3)
    return Net(
        forward,
        first=nn.Linear(D, D),
        norm=norm,
        again=norm,
        frozen=nn.LayerNorm(D).requires_grad_(False),
        plain=nn.LayerNorm(D, elementwise_affine=False).eval(),
        unbiased=nn.LayerNorm(D, bias=False),
        renamed=Renamed(D),
        rms=nn.RMSNorm(D),
        group=nn.GroupNorm(2, D),
        image=fp8.LayerNorm2d(D),
        own=HandMade(),
        permuting=Permuting(D),
        batch=nn.BatchNorm1d(D),
        last=nn.Linear(D, D),
    )


@pytest.fixture
def x():
    return normal(16, D)


def dtypes(model, x):
    """Module -> the dtype of its output."""
    found = {}
    handles = [
        module.register_forward_hook(
            lambda m, a, y, name=name: found.update({name: y.dtype})
        )
        for name, module in model.named_modules()
    ]
    model(x)
    for handle in handles:
        handle.remove()
    return found


@proves("Composer", "autocast off inside, input in low precision")
@proves("timm", "GroupNorm as well", "fast norm")
def test_follows_autocast_and_does_nothing_outside(model, x):
    before = model(x)
    assert low(model) is model
    assert_same(model(x), before)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            found = dtypes(model, x)
        assert {found[name] for name in CHANGED} == {dtype}
    # That it asks for the device of the input, not for CUDA: Composer's has no effect here.


@proves("Composer", "amp is float16, bf16 bfloat16")
@parametrize("precision", [name for name, dtype in PRECISIONS.items() if dtype])
def test_a_named_precision_holds_everywhere(model, x, precision):
    dtype = PRECISIONS[precision]
    low(model, precision)
    module = model.norm
    y = module(x)
    reference = nn.functional.layer_norm(
        x.to(dtype), (D,), module.weight.to(dtype), module.bias.to(dtype), 1e-3
    )
    assert y.dtype == torch.float32  # nothing would cast it for the next layer
    assert_same(y, reference.float())
    assert model(x).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert module(x).dtype == dtype
    low(model.double(), "AMP_BF16")  # takes the place of the last
    assert norms_of(model)[0].why == "bfloat16"
    assert model.norm(x.double()).dtype == torch.float64


@proves("Composer", "no effect in fp32 and fp16")
@parametrize("precision", [name for name, dtype in PRECISIONS.items() if not dtype])
def test_precisions_without_effect(model, precision):
    with warns(precision, fp8.warnings.ConvertWarning):
        assert fp8.apply_low_precision_layernorm(model, precision) is model
    assert norms_of(model) == []


@proves("Composer", "normalized_shape and eps are kept")
def test_everything_is_kept(model, x):
    """Composer's LPLayerNorm is a new float32 module: dtype, requires_grad, the evaluation flag and
    hooks are lost, and a bias=False layer is built with one."""
    model.norm.bfloat16()
    seen = []
    model.norm.register_forward_hook(lambda *_: seen.append(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    identities = [id(p) for p in model.parameters()]
    facts = [(n, p.dtype, p.requires_grad) for n, p in model.named_parameters()]
    keys, flags = list(model.state_dict()), [m.training for m in model.modules()]
    types, text = [type(m).__name__ for m in model.modules()], repr(model)

    low(model, "amp_bf16")
    assert [id(p) for p in model.parameters()] == identities
    assert [(n, p.dtype, p.requires_grad) for n, p in model.named_parameters()] == facts
    assert list(model.state_dict()) == keys
    assert [m.training for m in model.modules()] == flags
    assert [type(m).__name__ for m in model.modules()] == types
    assert isinstance(model.norm, nn.LayerNorm)
    assert model.again is model.norm
    assert model.norm.eps == 1e-3
    assert (model.plain.weight, model.unbiased.bias) == (None, None)
    assert "low_precision='bfloat16'" in repr(model)

    before = model.norm.weight.detach().clone()
    model(x).square().sum().backward()
    optimizer.step()
    assert len(seen) == 2  # both names of the shared norm
    assert not torch.equal(model.norm.weight, before)
    assert model.frozen.weight.grad is None

    assert fp8.revert(model) is model
    assert repr(model) == text
    kinds = [type(m) for m in model.modules() if type(m).__name__ == "LayerNorm"]
    assert kinds == [nn.LayerNorm] * 4


def test_report_names_every_norm_and_why(model):
    fp8.apply_low_precision_layernorm(model, where=lambda name, module: name != "group")
    report = norms_of(model)
    assert paths(report, "low precision") == {*CHANGED} - {"group"}
    why = by_path(report, "why")
    assert why["group"] == "not chosen"
    assert why["own"] == why["batch"] == why["permuting"]
    assert "computes otherwise than LayerNorm, RMSNorm" in why["own"]
    assert why["norm"] == "the dtype of autocast"
    # Not by Composer's.
    root = fp8.apply_low_precision_layernorm(nn.LayerNorm(4), "amp_fp16")
    assert norms_of(root)[0].why == "float16"


def test_with_converted_layers(model, x):
    """`convert` leaves norms as they are, whatever was before; `revert` undoes both."""
    before = model(x)
    fp8.convert(low(fp8.convert(model), "amp_bf16"), "unit")
    done = by_path(fp8.report(model), "done")
    assert (done["first"], done["norm"]) == ("converted", "low precision")
    fp8.revert(model)
    assert_same(model(x), before)
    assert {row.done for row in fp8.report(model)} == {"left alone"}


@proves("Composer", "apply_low_precision_layernorm")
def test_composers_function_changes_layer_norms(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert fp8.apply_low_precision_layernorm(model, "amp_bf16", optimizer) is model
    changed = set("norm frozen plain unbiased renamed image".split())
    assert paths(norms_of(model), "low precision") == changed
    with warns("no such norm", fp8.warnings.ConvertWarning):
        fp8.apply_low_precision_layernorm(nn.Linear(2, 2), "amp_bf16")


@parametrize("got", ["amp_bf17", 16, torch.bfloat16])
def test_errors_name_what_was_given(model, got):
    with refuses("unknown precision"):
        fp8.apply_low_precision_layernorm(model, got)
    with refuses("where is a str", TypeError):
        fp8.apply_low_precision_layernorm(model, where="norm")  # type: ignore[arg-type]
