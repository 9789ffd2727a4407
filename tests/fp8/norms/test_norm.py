"""Norms in low precision."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fp8
from fp8.norms import norm

C = 48

CALLS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], tuple[int, ...], int]] = {
    "layer_norm": (
        lambda x, w, b, **how: norm.layer_norm(x, (C,), w, b, **how),
        lambda x, w, b: F.layer_norm(x, (C,), w, b),
        (64, C),
        2,
    ),
    "rms_norm": (
        lambda x, w, **how: norm.rms_norm(x, (C,), w, **how),
        lambda x, w: F.rms_norm(x, (C,), w, 1e-5),
        (64, C),
        1,
    ),
    "group_norm": (
        lambda x, w, b, **how: norm.group_norm(x, 4, w, b, **how),
        lambda x, w, b: F.group_norm(x, 4, w, b),
        (4, C, 16),
        2,
    ),
    "layer_norm2d": (
        lambda x, w, b, **how: norm.layer_norm2d(x, w, b, **how),
        lambda x, w, b: F.layer_norm(x.movedim(1, -1), (C,), w, b, 1e-6).movedim(-1, 1),
        (4, C, 4, 4),
        2,
    ),
}
"""Name -> ours, torch's, the shape of an input, how many parameters."""

each_norm = pytest.mark.parametrize("name", CALLS)
each_low = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def arguments(name: str, mean: float = 0.0) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    *_, shape, parameters = CALLS[name]
    return (torch.randn(shape) + mean, *(torch.randn(C) + 1 for _ in range(parameters)))


def gradients(function: Callable[..., Tensor], tensors: Any) -> tuple[Tensor, ...]:
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    y = function(*leaves)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    return torch.autograd.grad(y, leaves, grad.to(y.dtype))


def error(value: Tensor, reference: Tensor) -> float:
    return float((value.double() - reference.double()).norm() / reference.double().norm())


@pytest.mark.proves("Composer", "math equivalent", how="own")
@pytest.mark.proves("timm", "statistics in float32 whatever the dtype", how="own")
@each_low
@each_norm
@pytest.mark.parametrize("mean", [0.0, 20.0])
def test_rounded_operands_wide_statistics_one_rounding_of_the_output(
    name: str, dtype: torch.dtype, mean: float
):
    ours, torchs, *_ = CALLS[name]
    tensors = arguments(name, mean)
    y = ours(*tensors, dtype=dtype)
    reference = torchs(*(t.to(dtype).double() for t in tensors))
    assert y.dtype == dtype
    # Half an ulp for the rounding; the float32 before it loses eps * mean.
    assert error(y, reference) < torch.finfo(dtype).eps / 2 + 1e-7 * mean + 1e-6


@pytest.mark.proves("timm", "statistics in float32 whatever the dtype", how="own")
@each_norm
@pytest.mark.parametrize("affine", [True, False])
def test_gradients_use_wide_statistics(name: str, affine: bool):
    """torch's kernels on a CPU keep mean and deviation in 16 bits where the parameters are: 20 has
    a rounding error of 2**-5 in bfloat16, a thirtieth of the deviation."""
    ours, torchs, *_ = CALLS[name]
    tensors = [t.bfloat16() for t in arguments(name, mean=20.0)]
    given = tensors if affine else tensors[:1]
    missing = [None] * (len(tensors) - len(given))
    references = gradients(lambda *t: torchs(*t, *missing), [t.double() for t in given])
    got = gradients(lambda *t: ours(*t, *missing), given)
    assert error(got[0], references[0]) < 0.004  # the rounding to bfloat16
    for value, reference in zip(got[1:], references[1:], strict=True):
        assert error(value, reference) < 0.02  # torch's kernels on a CPU sum rows in bfloat16


@pytest.mark.proves("Composer", "autocast off inside, input in low precision", how="own")
@each_norm
def test_in_autocasts_dtype_and_outside_as_it_came(name: str):
    ours, torchs, *_ = CALLS[name]
    tensors = arguments(name)
    with torch.autocast("cpu", torch.bfloat16):
        y = ours(*tensors)
        assert torch.is_autocast_enabled("cpu")
        assert ours(*(t.double() for t in tensors)).dtype == torch.float64
    torch.testing.assert_close(y, ours(*(t.bfloat16() for t in tensors)), rtol=0, atol=0)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(ours(*tensors), torchs(*tensors))
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        assert ours(*tensors).dtype == torch.float32


def test_errors_name_what_was_given():
    with pytest.raises(TypeError, match=r"dtype is 'bfloat16'; give a torch.dtype or None"):
        norm.layer_norm(torch.randn(2, 4), (4,), dtype="bfloat16")


def test_unit_scaling_sees_the_norm():
    """The public function is called: what replaces it, as `unit_scale` does, still does."""
    import unit_scaling as uu

    torch.manual_seed(0)
    x = torch.randn(64, C).requires_grad_()
    model = uu.transforms.unit_scale(nn.Sequential(nn.Linear(C, C), nn.LayerNorm(C)))
    model(x).sum().backward()
    plain = model[1].weight.grad.clone()
    model.zero_grad()
    fp8.apply_low_precision_layernorm(model, "amp_bf16")
    model(x).sum().backward()
    assert error(model[1].weight.grad, plain) < 0.02


@pytest.mark.proves("timm", "one operation over the channels", how="own")
@pytest.mark.sampled(2)
@pytest.mark.proves("timm", "one operation over the channels", how="own")
@pytest.mark.parametrize("around", [False, True])
def test_compiled_it_is_unit_scaled_as_in_eager_mode(around: bool):
    """The compiler shows a mode no call but torch's: this one goes to the mode by itself."""
    import unit_scaling as uu

    torch.manual_seed(0)
    layers = [nn.Conv2d(C, C, 1), fp8.LayerNorm2d(C), nn.Conv2d(C, C, 1)]
    model = uu.transforms.unit_scale(nn.Sequential(*layers))
    tensors = [torch.randn(2, C, 4, 4), *model.parameters()]

    def run(*leaves: Tensor) -> Tensor:
        parameters = dict(zip(dict(model.named_parameters()), leaves[1:], strict=True))
        with fp8.autocast("unit") if around else contextlib.nullcontext():
            return torch.func.functional_call(model, parameters, leaves[0])

    compiled = torch.compile(run, fullgraph=True, backend="eager")
    eager, graph = ([f(*tensors).detach(), *gradients(f, tensors)] for f in (run, compiled))
    for value, reference in zip(graph, eager, strict=True):
        assert error(value, reference) < (0.02 if around else 1e-5)


def test_default_eps_are_timms():
    """fast_rms_norm's and fast_layer_norm's; None is torch's, the machine epsilon of float32."""
    for dtype in (torch.float32, torch.bfloat16):
        x = (1e-3 * torch.randn(4, C, generator=torch.Generator().manual_seed(0))).to(dtype)
        ours, wide = norm.rms_norm(x, (C,)), F.rms_norm(x.float(), (C,), eps=1e-5)
        torch.testing.assert_close(ours, wide.to(dtype))
        smallest = torch.finfo(torch.float32).eps
        torch.testing.assert_close(
            norm.rms_norm(x, (C,), eps=None), F.rms_norm(x.float(), (C,), eps=smallest).to(dtype)
        )
    for function in (norm.rms_norm, norm.layer_norm, norm.group_norm):
        assert inspect.signature(function).parameters["eps"].default == 1e-5
