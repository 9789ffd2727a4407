"""`LayerNorm2d` and what computes it: torch's kernel, and compiled formulas."""

import functools
import io
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fp8
from fp8.torch_internals.autograd_functions import apply
from fp8.training import layer_norm2d as module
from fp8.training.layer_norm2d import layer_norm2d
from tests.shared import (
    assert_close,
    assert_same,
    in_one_graph,
    normal,
    pairs,
    parametrize,
    proves,
    refuses,
    sampled,
)

# What code is compiled to depends on it.
pytestmark = pytest.mark.usefixtures("one_thread")

FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

each_layout = parametrize("layout", FORMATS)
each_dtype = parametrize("dtype", DTYPES)


def image(*shape, dtype=torch.float32, layout="contiguous", mean=1.0):
    x = (torch.randn(shape) * 2 + mean).to(dtype)
    return x.contiguous(memory_format=FORMATS[layout]) if len(shape) == 4 else x


def parameters(channels, dtype=torch.float32):
    return (torch.rand(channels) + 0.5).to(dtype), torch.randn(channels).to(dtype)


def permuted(x, weight=None, bias=None):
    """timm's: permute, norm, permute."""
    last = x.movedim(1, -1)
    return F.layer_norm(last, last.shape[-1:], weight, bias, 1e-6).movedim(-1, 1)


def exact(*tensors):
    """In float64, by torch."""
    return permuted(*(t.double() for t in tensors))


def step(function, *tensors):
    """The output and the gradients of all tensors, for a fixed gradient of the output."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    y = function(*leaves)
    grad = normal(*y.shape, seed=1)
    grad = grad.to(tensors[0].dtype).to(y)
    return [y.detach(), *torch.autograd.grad(y, leaves, grad)]


def error(value, reference):
    """RMS of the error over that of the reference."""
    wide = reference.double()
    return float((value.double() - wide).norm() / wide.norm())


def summed(x):
    """The relative error of torch's sums over n pixels of 16 bits, which it rounds to 16 bits at
    each: that of the k-th has standard deviation eps / sqrt(12) of sqrt(k) terms or less, and of
    all eps n / sqrt(24), relative to sqrt(n)."""
    pixels = x.numel() // x.shape[1]
    return torch.finfo(x.dtype).eps * (pixels / 24) ** 0.5


def formula(x, weight, bias):
    """What is compiled, in eager mode."""
    return apply(module._LayerNorm2d, x, weight, bias, 1e-6)[0]


@sampled(3)
@parametrize("shape", [(2, 24, 7, 5), (3, 24), (2, 24, 7), (2, 24, 3, 2, 2)])
@each_layout
@each_dtype
def test_eager_it_is_permute_norm_permute(dtype, layout, shape):
    x, wb = image(*shape, dtype=dtype, layout=layout, mean=30.0), parameters(24, dtype)
    for given in (wb, wb[:1], ()):
        assert_same(step(layer_norm2d, x, *given), step(permuted, x, *given))


def last(*shape):
    """A tensor whose memory is channels-last, with such strides of sizes of 1 too."""
    x = torch.empty(shape, memory_format=torch.channels_last)
    return x.copy_(torch.randn(shape))


STORED = {
    "contiguous": lambda: torch.randn(2, 24, 9, 9),
    "channels-last": lambda: last(2, 24, 9, 9),
    "one channel": lambda: torch.randn(2, 1, 5, 4),
    "one pixel": lambda: torch.randn(2, 6, 1, 1),
    "some channels, channels-last": lambda: last(4, 12, 5, 4)[:, :6],
}


@sampled(2)
@proves("timm", "contiguous stays contiguous", "one operation over the channels")
@parametrize("dtype", DTYPES[1:3])
@parametrize("stored", STORED)
@parametrize("compiled", [False, True])
def test_output_and_gradient_are_stored_as_the_input(compiled, stored, dtype):
    """As `torch.preserve_format` says and pointwise operations of torch do, whatever the memory
    format of the gradient is. In a graph torch 2.13 takes other strides for a single channel."""
    x = STORED[stored]().to(dtype)
    (w, b), wanted = parameters(x.shape[1], dtype), torch.empty_like(x).stride()
    function = in_one_graph(layer_norm2d) if compiled else layer_norm2d
    leaf = x.detach().requires_grad_()
    y = function(leaf, w, b)
    assert_close(y, exact(x, w, b).to(dtype))
    grads = (
        torch.randn_like(y),
        torch.randn(*y.movedim(1, -1).shape, dtype=dtype).movedim(-1, 1),
    )
    found = [y, *(torch.autograd.grad(y, leaf, g, retain_graph=True)[0] for g in grads)]
    for value in found:
        strides = pairs(value.stride(), wanted, x.shape)
        assert all(a == b for a, b, size in strides if size > 1 or not compiled)


MODES = [("formula", dtype) for dtype in DTYPES]
MODES += [("compiled", dtype) for dtype in DTYPES[1:3]]


@sampled(3)
@each_layout
@parametrize("how, dtype", MODES)
def test_output_and_gradients_are_those_of_float64_rounded_once(how, layout, dtype):
    x = image(2, 24, 7, 5, dtype=dtype, layout=layout, mean=30.0)
    w, b = parameters(24, dtype)
    function = formula
    if how == "compiled":
        function = torch.compile(layer_norm2d, fullgraph=True)
    results, references = step(function, x, w, b), step(exact, x, w, b)
    # Half an ulp of each output is at most eps / 2 of it; the float32 before it is good to some
    # eps * mean / std of its own.
    tolerance = torch.finfo(dtype).eps / 2 + (1e-5 if dtype != torch.float64 else 1e-13)
    for result, like, reference in pairs(results, (x, x, w, b), references):
        assert result.dtype == like.dtype
        assert error(result, reference) < tolerance
        assert result.stride() == like.stride()


@parametrize("given", DTYPES)
@each_dtype
def test_parameters_of_any_dtype(dtype, given):
    """Where torch has no kernel for the two they are widened to the dtype of computation."""
    x, (w, b) = image(2, 6, 4, 4, dtype=dtype), parameters(6)
    v, a = w.to(given), b.to(given)
    for tensors in ((x, v, b), (x, w, a), (x, v, a)):
        results, references = step(layer_norm2d, *tensors), step(exact, *tensors)
        assert [t.dtype for t in results] == [dtype, *(t.dtype for t in tensors)]
        # A rounding of each result, the sums of torch, and statistics of a mean of 1 and a standard
        # deviation of 2 in the dtype of the parameters.
        limit = summed(x) + max(torch.finfo(t.dtype).eps for t in results) + 1e-6
        assert all(error(*pair) < limit for pair in pairs(results, references))


@each_layout
def test_twice_differentiable(layout):
    x = image(2, 3, 2, 2, dtype=torch.float64, layout=layout)
    leaves = [t.requires_grad_() for t in (x, *parameters(3, torch.float64))]
    for function in (layer_norm2d, formula):
        assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(layer_norm2d, leaves)


def test_under_torch_func():
    x, (w, b) = image(2, 3, 2, 2), parameters(3)
    many, weights = torch.stack([x, x + 1]), torch.stack([w, 2 * w])
    for function in (layer_norm2d, formula):
        each = torch.func.vmap(function, in_dims=(0, 0, None))(many, weights, b)
        wanted = [function(*pair, b) for pair in pairs(many, weights)]
        assert_close(each, torch.stack(wanted))
        grad = torch.func.grad(lambda x, f=function: f(x, w, b).square().sum())(x)
        assert_close(grad, torch.func.grad(lambda x: exact(x, w, b).square().sum())(x))
    call, tangent = lambda x: layer_norm2d(x, w, b), x.square()
    forward = torch.func.jvp(call, (x,), (tangent,))[1]
    backward = torch.func.vjp(call, x)[1]
    assert_close((forward * x).sum(), (backward(x)[0] * tangent).sum())


@functools.cache
def compiled_for(layout):
    """`layer_norm2d` compiled for 96 channels, as a benchmark would show it: forward, without a
    gradient, on one thread; and its code."""
    from torch._inductor.utils import run_and_get_code

    x, (w, b) = image(2, 96, 8, 8, layout=layout), parameters(96)
    function = torch.compile(layer_norm2d, fullgraph=True)
    with torch.no_grad():
        _, (code,) = run_and_get_code(function, x, w, b)
    return torch.no_grad()(function), code


@proves("timm", "no E[x²] - E[x]²")
@each_layout
@parametrize("how", ["formula", "compiled"])
def test_no_less_accurate_than_torch(how, layout):
    """Against float64, with standard deviation 1: torch's kernel. Near 0 the errors are a few
    roundings of the output, of which the formula has one or two more, or as many as torch has where
    torch 2.11 compiles it. Far from 0 torch loses digits."""
    ratio = 2.0 if how == "compiled" and torch.__version__ < (2, 12) else 1.25
    ours = lambda x, w, b: module._normalized(x, w, b, 1e-6)[0]  # noqa: E731
    if how == "compiled":
        ours, _ = compiled_for(layout)
    for seed, mean in itertools.product(range(5), (0.0, 10.0, 1e3, 1e5)):
        torch.manual_seed(seed)
        x = image(2, 96, 8, 8, layout=layout, mean=0.0) / 2 + mean
        w, b = parameters(96)
        reference = exact(x, w, b)
        bound = ratio * error(permuted(x, w, b), reference)
        assert error(ours(x, w, b), reference) <= bound


@proves("timm", "LayerNorm2d(num_channels, eps, affine)")
def test_constructor_is_timms():
    norm = fp8.LayerNorm2d(6, eps=1e-3, device="cpu", dtype=torch.float64)
    assert norm.eps == 1e-3
    assert norm.weight.dtype == norm.bias.dtype == torch.float64
    assert list(norm.state_dict()) == ["weight", "bias"]
    assert norm.normalized_shape == (6,)
    assert fp8.LayerNorm2d(6).eps == 1e-6
    assert list(fp8.LayerNorm2d(6, affine=False).parameters()) == []
    assert fp8.LayerNorm2d(6, bias=False).bias is None
    assert fp8.LayerNorm2d(6, bias=False, device="meta").weight.is_meta
    assert isinstance(norm, nn.LayerNorm)
    assert repr(norm) == f"LayerNorm2d({nn.LayerNorm(6, eps=1e-3).extra_repr()})"


@proves("timm", "TorchScript")
@each_layout
@parametrize("affine", [True, False])
# torch's own: TorchScript is deprecated, and still what servers run.
@parametrize("bias", [True, False])
def test_scripted_saved_and_loaded(layout, affine, bias):
    norm = fp8.LayerNorm2d(6, affine=affine, bias=bias)
    x, file = image(2, 6, 4, 4, layout=layout), io.BytesIO()
    torch.jit.save(torch.jit.script(norm), file)
    file.seek(0)
    y = torch.jit.load(file)(x)
    assert_close(y, norm(x))
    assert y.stride() == norm(x).stride()


@proves("timm", "export")
@each_layout
def test_exported_to_torchs_operations(layout):
    norm, x = fp8.LayerNorm2d(6), image(2, 6, 4, 4, layout=layout)
    sizes = ({0: torch.export.Dim.DYNAMIC},)
    program = torch.export.export(norm, (x,), dynamic_shapes=sizes)
    called = [n.target for n in program.graph.nodes if n.op == "call_function"]
    assert called
    assert all(str(target).startswith("aten.") for target in called)
    for batch in (x, torch.cat([x, x + 1]).contiguous(memory_format=FORMATS[layout])):
        y = program.module()(batch)
        assert_close(y, norm(batch))
        assert y.stride() == batch.stride()


@proves("timm", "channels-last without copies", "fused by the compiler")
@each_layout
def test_compiled_it_is_one_kernel_and_for_channels_last_one_loop(layout):
    _, code = compiled_for(layout)
    assert code.count("cpp_pybinding(") == 1
    outer = code.count("\n        for(")
    # Statistics of blocks and of all, roots and the rest, each of them once.
    assert outer == 1 if layout == "channels_last" else outer <= 4
    assert code.count("rsqrt()") + code.count("std::sqrt(") == 1


def test_errors_name_what_was_given():
    with refuses("got 1 dimensions"):
        layer_norm2d(torch.ones(4))
    with refuses(r"weight must have shape \(4,\), got \(3,\)"):
        layer_norm2d(torch.ones(2, 4, 3, 3), torch.ones(3))
    for dtype in (torch.int64, torch.cfloat):
        with refuses(str(dtype).rpartition(".")[2], TypeError):
            layer_norm2d(torch.ones(2, 4, dtype=dtype))
    x, plain = torch.ones(2, 7, 3, 3), fp8.LayerNorm2d(8, affine=False)
    with refuses("weight must have shape"):
        fp8.LayerNorm2d(8)(x)
    for norm, error in (
        (plain, ValueError),
        (torch.jit.script(plain), torch.jit.Error),
    ):
        with refuses("8 channels, its input 7", error):
            norm(x)


@pytest.mark.gpu
@each_layout
@each_dtype
def test_on_cuda_as_in_float64(dtype, layout):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    x, (w, b) = image(3, 96, 14, 14, dtype=dtype, layout=layout), parameters(96, dtype)
    there = step(layer_norm2d, *(t.cuda() for t in (x, w, b)))
    for a, reference in pairs(there, step(exact, x, w, b)):
        assert error(a.cpu(), reference) < 2 * torch.finfo(dtype).eps + 1e-6


OFF = {
    "near 0": (0.0, 0),
    "far from 0": (1e3, 0),
    "the first channel off": (0.0, 1),
    "the first sixteen off": (0.0, 16),
}


@parametrize("case", OFF)
@each_layout
@parametrize("dtype", DTYPES[1:])
def test_statistics_whatever_channel_is_off(dtype, layout, case):
    mean, far = OFF[case]
    x = torch.randn(4, 768, 6, 6) + mean
    x[:, :far] = 1e3 * (1 + 0.1 * torch.randn(4, far, 6, 6))
    x = x.to(dtype).contiguous(memory_format=FORMATS[layout])
    var, reference = torch.var_mean(x.double(), 1, correction=0, keepdim=True)
    limit = torch.finfo(torch.float32).eps * 8  # a few sums, products and the root
    for statistics in (module._statistics, module._statistics_by_blocks):
        m, d, rstd = statistics(module._wide(x, x), 1e-6)
        assert ((m.double() + d.double() - reference) / var.sqrt()).abs().max() < limit
        assert (rstd.double() * (var + 1e-6).sqrt() - 1).abs().max() < limit
