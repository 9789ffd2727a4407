"""`LayerNorm2d`: torch's kernel over the channels, and memory formats."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fp8
from fp8.norms.layer_norm2d import layer_norm2d

FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

each_layout = pytest.mark.parametrize("layout", FORMATS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def image(
    *shape: int, dtype: torch.dtype = torch.float32, layout: str = "contiguous", mean: float = 1.0
) -> Tensor:
    x = (torch.randn(shape) * 2 + mean).to(dtype)
    return x.contiguous(memory_format=FORMATS[layout]) if len(shape) == 4 else x


def parameters(channels: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return (torch.rand(channels) + 0.5).to(dtype), torch.randn(channels).to(dtype)


def exact(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-6) -> Tensor:
    """In float64, by torch."""
    wide = [None if t is None else t.double() for t in (weight, bias)]
    last = x.double().movedim(1, -1)
    return F.layer_norm(last, last.shape[-1:], *wide, eps).movedim(-1, 1)


def step(function: Any, *tensors: Tensor) -> list[Tensor]:
    """The output and the gradients of all tensors, for a fixed gradient of the output."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    y = function(*leaves)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    grad = grad.to(tensors[0].dtype).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, leaves, grad)]


def error(value: Tensor, reference: Tensor) -> float:
    """RMS of the error over that of the reference."""
    wide = reference.double()
    return float((value.double() - wide).square().mean().sqrt() / wide.square().mean().sqrt())


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """What code is compiled to depends on it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def permuted(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-6) -> Tensor:
    """timm's: permute, norm, permute."""
    last = x.movedim(1, -1)
    return F.layer_norm(last, last.shape[-1:], weight, bias, eps).movedim(-1, 1)


def summed(x: Tensor) -> float:
    """The relative error of torch's sums over n pixels of 16 bits, which it rounds to 16 bits at
    each: that of the k-th has standard deviation eps / sqrt(12) of sqrt(k) terms or less, and of
    all eps n / sqrt(24), relative to sqrt(n)."""
    pixels = x.numel() // x.shape[1]
    return torch.finfo(x.dtype).eps * (pixels / 24) ** 0.5


@pytest.mark.proves("timm", "channels-last without copies", how="own")
@pytest.mark.parametrize("shape", [(2, 24, 7, 5), (3, 24)], ids=str)
@each_layout
@each_dtype
@pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # torch 2.11's own
def test_eager_it_is_permute_norm_permute(dtype: torch.dtype, layout: str, shape: tuple[int, ...]):
    """To the bit, with as many copies: one more each of output and gradient where those of torch
    are in another format than the input."""
    x, wb = image(*shape, dtype=dtype, layout=layout, mean=30.0), parameters(24, dtype)
    more = 0 if x.movedim(1, -1).is_contiguous() else 2
    for given in (wb, wb[:1], ()):
        results, copies = [], []
        for function in (layer_norm2d, permuted):
            missing = [None] * (2 - len(given))
            with torch.profiler.profile() as profile:
                results.append(step(lambda *t, f=function, m=missing: f(*t, *m), x, *given))
            copies.append(sum(e.name == "aten::copy_" for e in profile.events()))
        for result, reference in zip(*results, strict=True):
            assert torch.equal(result, reference)
        assert copies[0] <= copies[1] + more


def last(*shape: int) -> Tensor:
    """A tensor whose memory is channels-last, with such strides of sizes of 1 too."""
    x = torch.empty(shape, memory_format=torch.channels_last)
    return x.copy_(torch.randn(shape))


STORED = {
    "contiguous": lambda: torch.randn(2, 24, 9, 9),
    "channels-last": lambda: last(2, 24, 9, 9),
    "one image, channels-last": lambda: last(1, 6, 5, 4),
    "one pixel, channels-last": lambda: last(2, 6, 1, 1),
    "no image": lambda: torch.randn(0, 6, 2, 2),
    "rows": lambda: torch.randn(4, 6),
    "columns": lambda: torch.randn(6, 4).t(),
    "sequences": lambda: torch.randn(4, 6, 5),
    "volumes, channels-last": lambda: torch.randn(2, 3, 2, 2, 6).movedim(-1, 1),
    "channels first": lambda: torch.randn(6, 2, 5, 4).movedim(0, 1),
    "some channels": lambda: torch.randn(4, 12, 5, 4)[:, :6],
    "expanded images": lambda: torch.randn(1, 6, 5, 4).expand(3, 6, 5, 4),
    "expanded channels": lambda: torch.randn(2, 1, 5, 4).expand(2, 6, 5, 4),
}


@pytest.mark.proves("timm", "contiguous stays contiguous", how="own")
@pytest.mark.proves("timm", "one operation over the channels", how="own")
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("compiled", [False, True])
def test_output_and_gradient_are_stored_as_the_input(compiled: bool, stored: str):
    """As `torch.preserve_format` says and pointwise operations of torch do, whatever the memory
    format of the gradient is. In a graph torch 2.13 takes other strides for a single channel."""
    x = STORED[stored]()
    (w, b), wanted = parameters(x.shape[1]), torch.empty_like(x).stride()
    torch.compiler.reset()
    backend = {"backend": "aot_eager", "fullgraph": True}
    function = torch.compile(layer_norm2d, **backend) if compiled else layer_norm2d
    leaf = x.detach().requires_grad_()
    y = function(leaf, w, b)
    torch.testing.assert_close(y, exact(x, w, b).float())
    grads = torch.randn_like(y), torch.randn(*y.movedim(1, -1).shape).movedim(-1, 1)
    found = [y, *(torch.autograd.grad(y, leaf, g, retain_graph=True)[0] for g in grads)]
    if compiled and torch.__version__ < "2.12":
        found = [y]
    for value in found:
        strides = zip(value.stride(), wanted, x.shape, strict=True)
        assert all(a == b for a, b, size in strides if size > 1 or not compiled)


@pytest.mark.proves("timm", "fused by the compiler", how="own")
@pytest.mark.proves("timm", "no E[x²] - E[x]²", how="own")
@each_layout
def test_compiled_it_is_one_kernel_with_the_error_of_float32(layout: str):
    """At a mean of 30: float32 is good to some eps * mean / std, E[x²] - E[x]² to its square."""
    from torch._inductor.utils import run_and_get_code

    x, (w, b) = image(2, 24, 7, 5, layout=layout, mean=30.0), parameters(24)
    compiled = torch.compile(layer_norm2d, fullgraph=True, dynamic=False)
    results, codes = run_and_get_code(step, compiled, x, w, b)
    assert [code.count("cpp_pybinding(") for code in codes] == [1, 1]  # forward and backward
    for function in (step(layer_norm2d, x, w, b), results):
        for value, reference in zip(function, step(exact, x, w, b), strict=True):
            assert error(value, reference) < 1e-5


@pytest.mark.parametrize(
    ("dtype", "given"),
    [*itertools.product(DTYPES[1:3], DTYPES[1:3]), (torch.float64, torch.float16)],
    ids=str,
)
def test_parameters_of_any_dtype(dtype: torch.dtype, given: torch.dtype):
    """Where torch has no kernel for the two they are widened to the dtype of computation."""
    x, (w, b) = image(2, 6, 4, 4, dtype=dtype), parameters(6)
    for tensors in ((x, w.to(given), b), (x, w, b.to(given)), (x, w.to(given), b.to(given))):
        results, references = step(layer_norm2d, *tensors), step(exact, *tensors)
        assert [t.dtype for t in results] == [dtype, *(t.dtype for t in tensors)]
        # A rounding of each result, the sums of torch, and statistics of a mean of 1 and a standard
        # deviation of 2 in the dtype of the parameters.
        assert error(results[0], references[0]) < torch.finfo(dtype).eps / 2 + 1e-6
        limit = summed(x) + max(torch.finfo(t.dtype).eps for t in results) + 1e-6
        for result, reference in zip(results[1:], references[1:], strict=True):
            assert error(result, reference) < limit


@each_layout
def test_twice_differentiable(layout: str):
    x, w, b = image(2, 3, 2, 2, dtype=torch.float64, layout=layout), *parameters(3, torch.float64)
    leaves = [t.requires_grad_() for t in (x, w, b)]
    assert torch.autograd.gradcheck(layer_norm2d, leaves)
    assert torch.autograd.gradgradcheck(layer_norm2d, leaves)


def test_under_torch_func():
    x, (w, b) = image(2, 3, 2, 2), parameters(3)
    many, weights = torch.stack([x, x + 1, 2 * x]), torch.stack([w, 2 * w])
    each = torch.func.vmap(layer_norm2d, in_dims=(0, None, None))(many, w, b)
    torch.testing.assert_close(each, torch.stack([layer_norm2d(x, w, b) for x in many]))
    each = torch.func.vmap(layer_norm2d, in_dims=(None, 0, None))(x, weights, b)
    torch.testing.assert_close(each, torch.stack([layer_norm2d(x, w, b) for w in weights]))
    grad = torch.func.grad(lambda x: layer_norm2d(x, w, b).square().sum())(x)
    leaf = x.clone().requires_grad_()
    (reference,) = torch.autograd.grad(layer_norm2d(leaf, w, b).square().sum(), leaf)
    torch.testing.assert_close(grad, reference)
    call, tangent = lambda x: layer_norm2d(x, w, b), x.square()
    forward = torch.func.jvp(call, (x,), (tangent,))[1]
    backward = torch.func.vjp(call, x)[1]
    torch.testing.assert_close((forward * x).sum(), (backward(x)[0] * tangent).sum())


def test_nan_and_inf_spoil_their_pixel_alone():
    x, (w, b) = image(1, 4, 2, 2), parameters(4)
    x[0, 1, 0, 0], x[0, 2, 1, 1] = torch.nan, torch.inf
    y = layer_norm2d(x, w, b)
    assert y[0, :, 0, 0].isnan().all()
    assert y[0, :, 1, 1].isnan().all()
    assert y[0, :, 0, 1].isfinite().all()


@pytest.mark.proves("timm", "LayerNorm2d(num_channels, eps, affine)", how="own")
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


@pytest.mark.proves("timm", "export", how="own")
@each_layout
def test_exported_to_torchs_operations(layout: str):
    norm, x = fp8.LayerNorm2d(6), image(2, 6, 4, 4, layout=layout)
    program = torch.export.export(norm, (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    names = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert names
    assert all(name.startswith("aten.") for name in names)
    for batch in (x, torch.cat([x, x + 1]).contiguous(memory_format=FORMATS[layout])):
        y = program.module()(batch)
        torch.testing.assert_close(y, norm(batch))
        assert y.stride() == batch.stride()


def test_compiled_with_another_batch():
    norm = fp8.LayerNorm2d(8)
    compiled = torch.compile(norm, fullgraph=True, dynamic=True)
    for batch in (2, 3):
        x = image(batch, 8, 5, 4, layout="channels_last")
        torch.testing.assert_close(compiled(x), norm(x))
        assert compiled(x).stride() == x.stride()


def test_errors_name_what_was_given():
    with pytest.raises(ValueError, match="got 1 dimensions"):
        layer_norm2d(torch.ones(4))
    with pytest.raises(ValueError, match=r"weight must have shape \(4,\), got \(3,\)"):
        layer_norm2d(torch.ones(2, 4, 3, 3), torch.ones(3))
    for function in (layer_norm2d, torch.compile(layer_norm2d, backend="eager")):
        for shape, dtype in itertools.product([(2, 4), (0, 4, 3, 3)], [torch.int64, torch.cfloat]):
            with pytest.raises(TypeError, match=str(dtype).rpartition(".")[2]):
                function(torch.ones(shape, dtype=dtype))


def test_without_a_weight_the_channels_are_counted_too():
    for affine, what in ((True, "weight must have shape"), (False, "8 channels, its input 7")):
        with pytest.raises(ValueError, match=what):
            fp8.LayerNorm2d(8, affine=affine)(torch.ones(2, 7, 3, 3))
    with pytest.raises(ValueError, match="got 1 dimensions"):
        fp8.LayerNorm2d(8, affine=False)(torch.ones(8))


@pytest.mark.gpu
@each_layout
@each_dtype
def test_on_cuda_as_in_float64(dtype: torch.dtype, layout: str):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    x, (w, b) = image(3, 96, 14, 14, dtype=dtype, layout=layout), parameters(96, dtype)
    leaves = [t.cuda().requires_grad_() for t in (x, w, b)]
    y = layer_norm2d(*leaves)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
    there = [y, *torch.autograd.grad(y, leaves, grad.cuda())]
    for a, reference in zip(there, step(exact, x, w, b), strict=True):
        assert error(a.cpu(), reference) < 2 * torch.finfo(dtype).eps + 1e-6
