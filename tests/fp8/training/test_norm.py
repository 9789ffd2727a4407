"""Norms in low precision."""

import torch
from torch import nn
from torch.nn import functional as F

import fp8
from tests.fp8.training.test_layer_norm2d import error, permuted
from tests.shared import assert_close, assert_same, normal, pairs, parametrize, proves

C = 48

NORMS = {
    "layer_norm": (
        lambda affine: nn.LayerNorm(C, elementwise_affine=affine),
        lambda x, *parameters: F.layer_norm(x, (C,), *parameters),
        (64, C),
    ),
    "rms_norm": (
        lambda affine: nn.RMSNorm(C, elementwise_affine=affine),
        lambda x, weight=None: F.rms_norm(
            x, (C,), weight, torch.finfo(torch.float32).eps
        ),
        (64, C),
    ),
    "group_norm": (
        lambda affine: nn.GroupNorm(4, C, affine=affine),
        lambda x, *parameters: F.group_norm(x, 4, *parameters),
        (4, C, 16),
    ),
    "layer_norm2d": (
        lambda affine: fp8.LayerNorm2d(C, affine=affine),
        permuted,
        (4, C, 4, 4),
    ),
}
"""Name -> the module, torch's function, the shape of an input."""

each_norm = parametrize("name", NORMS)
PRECISIONS = {"amp_bf16": torch.bfloat16, "amp_fp16": torch.float16}


def made(name, precision=None, mean=0.0, affine=True):
    """A norm in low precision as a function of its input and parameters, and these."""
    torch.manual_seed(0)
    make, _, shape = NORMS[name]
    module = make(affine)
    fp8.apply_low_precision_layernorm(module, precision, where=lambda name, norm: True)
    names = [n for n, _ in module.named_parameters()]

    def run(x, *parameters):
        return torch.func.functional_call(module, dict(pairs(names, parameters)), x)

    return run, [torch.randn(shape) + mean, *(torch.randn(C) + 1 for _ in names)]


def gradients(function, tensors):
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    y = function(*leaves)
    grad = normal(*y.shape, seed=1).bfloat16()
    return torch.autograd.grad(y, leaves, grad.to(y.dtype))


@proves("Composer", "math equivalent")
@proves("timm", "statistics in float32 whatever the dtype")
@parametrize("precision", PRECISIONS)
@each_norm
@parametrize("mean", [0.0, 20.0])
def test_rounded_operands_wide_statistics_one_rounding_of_the_output(
    name, precision, mean
):
    dtype, (norm, tensors) = PRECISIONS[precision], made(name, precision, mean)
    y = norm(*tensors)
    reference = NORMS[name][1](*(t.to(dtype).double() for t in tensors))
    assert_same(y, y.to(dtype).float())
    # Half an ulp for the rounding; the float32 before it loses eps * mean.
    assert error(y, reference) < torch.finfo(dtype).eps / 2 + 1e-7 * mean + 1e-6


@proves("timm", "statistics in float32 whatever the dtype")
@each_norm
@parametrize("affine", [True, False])
def test_gradients_use_wide_statistics(name, affine):
    """torch's kernels on a CPU keep mean and deviation in 16 bits where the parameters are: 20 has
    a rounding error of 2**-5 in bfloat16, a thirtieth of the deviation."""
    norm, tensors = made(name, "amp_bf16", 20.0, affine)
    tensors = [t.bfloat16() for t in tensors]
    references = gradients(NORMS[name][1], [t.double() for t in tensors])
    got = gradients(norm, tensors)
    assert error(got[0], references[0]) < 0.004  # the rounding to bfloat16
    for value, reference in pairs(got[1:], references[1:]):
        assert (
            error(value, reference) < 0.02
        )  # torch's kernels on a CPU sum rows in bfloat16


def test_the_eps_of_an_rms_norm_is_that_of_float32():
    """torch's, None, is that of the dtype of the input."""
    norm, (x, weight) = made("rms_norm", "amp_bf16")
    x = 1e-3 * x.bfloat16()
    reference = F.rms_norm(x.float(), (C,), weight.bfloat16().float())
    assert_close(norm(x, weight), reference.bfloat16())
