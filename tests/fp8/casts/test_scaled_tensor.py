"""ScaledTensor against the same operations on plain tensors."""

import math
from copy import deepcopy

import torch
import torch.distributed as dist
from torch import nn

import fp8
from fp8.casts.scaled_tensor import (
    STORED,
    ScaledTensor,
    dequantized,
    keep_gradients_in,
    scaled,
)
from tests.launch import needs_gloo
from tests.shared import (
    assert_close,
    assert_same,
    in_one_graph,
    linears,
    normal,
    pairs,
    parametrize,
    pickled,
    refuses,
    saved,
)

BF16 = torch.bfloat16
#: Half a step of each format, as a share of the number.
HALF_STEP = {"e4m3": 2.0**-4, "e5m2": 2.0**-3, "fp16": 2.0**-11}

each_format = parametrize("format", STORED)


@each_format
@parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@parametrize("size", [2.0**-12, 1.0, 1000.0])
def test_it_holds_what_quantize_gives(format, dtype, size):
    x = (normal(7, 5) * size).to(dtype)
    y = scaled(x, format)
    assert (y.dtype, y.shape, y.format) == (dtype, x.shape, format)
    assert y.scale.log2() == y.scale.log2().round()
    limit = fp8.FORMATS[format].max
    assert limit / 2 <= x.float().abs().max() / y.scale <= limit
    expected = fp8.quantize(x.float(), format, scale=y.scale)
    assert_same(y.dequantize(torch.float32), expected)
    assert_same(y.dequantize(), expected.to(dtype))
    loaded = pickled(y)  # of no parameter
    assert (type(loaded), loaded.dtype) == (torch.Tensor, torch.float32)
    assert_same(loaded, expected)


@each_format
def test_inf_and_nan(format):
    y = scaled(torch.tensor([1.0, torch.inf, -torch.inf, torch.nan]), format)
    infinity = torch.nan if format == "e4m3" else torch.inf
    expected = torch.tensor([1.0, infinity, -infinity, torch.nan])
    assert_same(y.dequantize(), expected, equal_nan=True)
    assert y.scale == scaled(torch.ones(1), format).scale


@each_format
def test_sizes_zeros_and_values_of_the_format(format):
    values = scaled(normal(1000), format).dequantize()
    for x in (torch.zeros(3), torch.zeros(0, 4), torch.tensor(3.0), values):
        y = scaled(x, format)
        assert_same(y.dequantize(), x)
        assert type((y + 1) * 2) is torch.Tensor
    values = torch.tensor([0.0, 1.0, 100.0])
    assert scaled(values, format).mul_(0.0).dequantize().eq(0).all()
    assert scaled(values, format).mul_(math.nan).dequantize().isnan().all()
    assert not scaled(values, format).div_(0.0).dequantize().isfinite().any()


def test_bad_input():
    with refuses("e4m3, e5m2, fp16, not 'bf16'"):
        scaled(torch.ones(2), "bf16")
    with refuses(r"float32, bfloat16, float16, not torch\.float64", TypeError):
        scaled(torch.ones(2, dtype=torch.float64), "e4m3")
    x = scaled(normal(4, 4), "e4m3")
    for change in (x.t_, lambda: x.resize_(2, 2), lambda: x.set_(torch.ones(4, 4))):
        with refuses(r"assign x\.data = y", NotImplementedError):
            change()
    with refuses(r"bfloat16 has its values in torch\.float32", RuntimeError):
        scaled(normal(4, 4).bfloat16(), "e4m3").data_ptr()
    with refuses("read-only"):
        x.numpy()[0] = 1


IN_PLACE = {
    "add_": lambda x, y: x.add_(y, alpha=0.5),
    "addcdiv_": lambda x, y: x.addcdiv_(y, y.square() + 1, value=-0.1),
    "copy_": lambda x, y: x.copy_(y),
    "mul_": lambda x, y: x.mul_(y),
    "zero_": lambda x, y: x.zero_(),
    "view": lambda x, y: x.view(-1).add_(1),
    "t": lambda x, y: x.t().add_(y.t()),
    "part": lambda x, y: x[2:5, 1:].mul_(3),
    "index": lambda x, y: x.__setitem__(x.abs() > 1, 0.1),
    "sub_": lambda x, y: x.sub_(x.detach()),
    "out": lambda x, y: torch.add(y, y, out=x),
    "foreach": lambda x, y: torch._foreach_add_([x, y.clone()], [y, y]),
}


@parametrize("name", IN_PLACE)
def test_in_place(name):
    """The result is the plain one, which all views see, until it is stored."""
    x, format = scaled(normal(6, 4), "e4m3"), "e4m3"
    views, expected = (x.detach(), x.data.t(), x[1:3]), x.dequantize()
    y = normal(6, 4, seed=1)
    IN_PLACE[name](x, y)
    IN_PLACE[name](expected, y)
    seen = (expected, expected.t(), expected[1:3])
    for view, numbers_ in pairs((x, *views[1:]), seen):
        assert_close(view.dequantize(), numbers_, rtol=2**-22, atol=0)
    assert views[0].scale is None
    assert views[2].format == format
    x.store()
    after = scaled(expected, format).dequantize()
    assert x.stored.dtype == fp8.FORMATS[format].dtype
    for view in (x, views[0], views[1].t()):
        assert_close(view.dequantize(), after, rtol=2**-22, atol=0)


FUNCTIONS = {
    "norm": torch.linalg.vector_norm,
    "norms": lambda x: torch._foreach_norm([x, x])[1],
    "matmul": lambda x: x @ x.t(),
    "linear": lambda x: torch.nn.functional.linear(torch.ones(2, 4), x),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "cat": lambda x: torch.cat([x, x]),
    "double": lambda x: x.double(),
    "part": lambda x: x[2:4, 1],
    "parts": lambda x: x.chunk(2)[1],
    "zeros_like": torch.zeros_like,
}


@parametrize("name", FUNCTIONS)
def test_other_operations_are_those_of_its_numbers(name):
    x = scaled(normal(6, 4), "e4m3")
    before = x.dequantize()
    result, expected = FUNCTIONS[name](x), FUNCTIONS[name](before)
    assert_same(dequantized(result), expected)
    assert (result.dtype, result.stride()) == (expected.dtype, expected.stride())
    assert_same(x.dequantize(), before)


def test_copies_do_not_pass_through_its_dtype():
    exact = scaled(normal(100), "fp16")
    x = scaled(torch.zeros(100, dtype=torch.bfloat16), "fp16")
    x.copy_(exact.dequantize())
    assert_same(x.dequantize(torch.float32), exact.dequantize())
    assert_same(torch.empty(100).copy_(x), exact.dequantize())
    assert_same(x.to(torch.float32).dequantize(), exact.dequantize())
    x.zero_()
    x.copy_(exact)
    assert_same(x.dequantize(torch.float32), exact.dequantize())


def test_its_memory_is_read_by_others():
    """By safetensors and kernels, as float32."""
    x = scaled(normal(4, 4), "e4m3")
    expected = x.dequantize()
    assert x.nbytes == 16 + 4
    (pointer,) = {y.data_ptr() for y in (x.t(), x, x.storage(), x.stored)}
    assert pointer != 0
    assert_same(x.stored, expected)
    assert x.nbytes == 64
    assert_same(torch.tensor(x.numpy()), expected)
    assert x.tolist() == expected.tolist()


def test_copy_and_pickle():
    x = weight(6, 4)
    x.mup_type = "weight"
    x.sum().backward()
    for other in (deepcopy(x), saved(x)):
        assert isinstance(other, nn.Parameter)
        assert isinstance(other, ScaledTensor)
        assert other.stored.data_ptr() != x.stored.data_ptr()
        assert_same(other, x)
        assert other.mup_type == "weight"
        assert other.grad is None
        other.sum().backward()
        assert other.grad.format == "e4m3"


# --- gradients ----------------------------------------------------------------------------------


def weight(*shape):
    parameter = nn.Parameter(scaled(normal(*(shape or (32, 16))), "fp16"))
    keep_gradients_in(parameter, "e4m3")
    return parameter


def mean_square(x, w, open):
    return torch.nn.functional.linear(x, dequantized(w) if open else w).square().mean()


def loss(w, seed=0, open=False, step=mean_square):
    return step(normal(8, 16, seed=seed), w, open)


def gradient(w, *seeds):
    x = w.dequantize().requires_grad_()
    for seed in seeds:
        loss(x, seed).backward()
    return x.grad


@parametrize("open", [False, True])
@parametrize("compiled", [False, True])
def test_gradients_of_one_pass(open, compiled):
    w = weight()
    compiler = in_one_graph(mean_square)
    loss(w, 0, open, compiler if compiled else mean_square).backward()
    assert (w.grad.format, w.grad.nbytes) == ("e4m3", w.numel() + 4)
    expected = scaled(gradient(w, 0), "e4m3").dequantize()
    assert_close(w.grad.dequantize(), expected, rtol=2**-3, atol=1e-6)


@parametrize(
    "count, equal, dtype",
    [(1, True, BF16), (128, True, BF16), (1024, False, torch.float32)],
)
def test_gradients_add_up(count, equal, dtype):
    """Micro-batches: the first is rounded to e4m3, and then each sum to float32."""
    w = nn.Parameter(scaled(normal(8, 4).to(dtype), "fp16"))
    keep_gradients_in(w, "e4m3")
    seeds = [0] * count if equal else range(count)
    terms = torch.stack([normal(8, 4, seed=seed).to(dtype) for seed in seeds])
    for term in terms:
        (w * term).sum().backward()
    error = (w.grad.dequantize(torch.float32) - terms.double().sum(0)).abs()
    first = terms[0].abs()
    step = torch.maximum(first.double() * HALF_STEP["e4m3"], first.max() * 2**-18)
    sums = terms.double().abs().sum(0) * count * 2**-24
    assert (error <= step + sums).all()
    assert w.grad.dtype == dtype
    assert w.grad.nbytes == (w.numel() + 4 if count == 1 else 4 * w.numel())


def test_gradients_begin_anew_at_zero():
    w = weight()
    for forget in (lambda: setattr(w, "grad", None), lambda: w.grad.zero_()):
        loss(w, 0).backward()
        loss(w, 1).backward()
        forget()
        loss(w, 2).backward()
        error = (w.grad.dequantize() - gradient(w, 2)).norm()
        assert error <= HALF_STEP["e4m3"] * gradient(w, 2).norm()
    held = w.grad  # a gradient that others hold is not added to
    before = held.dequantize()
    w.grad = None
    loss(w, 0).backward()
    assert_close(w.grad.dequantize(), gradient(w, 0))
    assert_same(held, before)


def test_a_gradient_that_is_copied_into_is_rounded():
    """As DistributedDataParallel does with an average: one byte again. Of a weight that is used
    twice the sum is rounded once."""
    w = weight()
    loss(w, 0).backward()
    loss(w, 1).backward()
    average = gradient(w, 0, 1)
    w.grad.copy_(average)
    assert w.grad.nbytes == w.numel() + 4
    assert_same(w.grad, scaled(average, "e4m3").dequantize())
    w.grad = None
    (loss(w, 0) + loss(w, 1)).backward()
    assert_same(w.grad, scaled(average, "e4m3").dequantize())


def test_clip_grad_norm():
    w = weight()
    loss(w).backward()
    stored, norm = w.grad.stored, w.grad.dequantize().norm()
    total = nn.utils.clip_grad_norm_([w, nn.Parameter(torch.ones(2))], norm.item() / 2)
    assert_close(total, norm)
    assert w.grad.stored is stored
    assert_close(w.grad.dequantize().norm(), norm / 2)
    w.grad.mul_(torch.nan)
    with refuses("non-finite", RuntimeError):
        nn.utils.clip_grad_norm_([w], 1.0, error_if_nonfinite=True)


@parametrize("bad", [None, torch.inf, -torch.inf, torch.nan])
def test_grad_scaler(bad):
    w, bias = weight(), nn.Parameter(torch.zeros(3))
    before = w.dequantize()
    optimizer = torch.optim.SGD([w, bias], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(loss(w) + bias.sum()).backward()
    expected = scaled(gradient(w, 0), "e4m3").dequantize()
    if bad is not None:
        w.grad += torch.full((32, 16), 1.0).index_fill_(0, torch.tensor([3]), bad)
    scaler.unscale_(optimizer)
    if bad is None:
        assert_same(w.grad.dequantize(), expected)
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(w.dequantize(), before) == (bad is not None)
    assert scaler.get_scale() == (1024.0 if bad is None else 512.0)


def test_a_weight_that_is_no_longer_frozen():
    w = weight().requires_grad_(False).requires_grad_(True)
    other = deepcopy(w.requires_grad_(False)).requires_grad_()
    loss(other).backward()
    assert other.grad.format == "e4m3"
    assert w.requires_grad_() is w
    layer = nn.Linear(16, 32)
    layer.weight = other
    layer.bfloat16()
    layer(normal(8, 16).bfloat16()).sum().backward()
    assert isinstance(layer.weight, ScaledTensor)
    assert layer.weight.dtype == torch.bfloat16
    assert_same(layer.weight.dequantize(torch.float32), weight().dequantize())


def test_data_is_shared():
    """Initializers, averages of weights and merged adapters assign to ``.data``."""
    weight = nn.Parameter(scaled(torch.zeros(32, 16), "fp16"))
    numbers = torch.randn(34, 16)[2:]
    alias = weight.data
    weight.data = numbers
    with torch.no_grad():
        weight[1:].add_(1)
    assert_same(weight, numbers)
    assert not alias.dequantize().any()
    weight.detach().store()
    assert_same(weight, scaled(numbers, "fp16").dequantize())
    part = weight.t()[3:].as_strided((2, 3), (1, 4), 40)
    assert_same(part, weight.dequantize().as_strided((2, 3), (1, 4), 40))
    weight.data = numbers.mT.bfloat16()
    assert (weight.shape, weight.dtype, weight.format) == ((16, 32), BF16, "fp16")
    assert_same(weight, numbers.mT.bfloat16())
    assert not weight.data.requires_grad
    weight.data = alias
    assert_same(weight, torch.zeros(32, 16))


def test_shared_memory_is_refused():
    model, _ = fp8.initialize(linears(16, 32))
    with refuses(r"share x\.dequantize\(\)", NotImplementedError):
        model.share_memory()


@needs_gloo
def test_collectives_are_refused(one_process):
    """They return before the values have arrived, which would be stored too early."""
    x = scaled(torch.ones(4), "e4m3")
    for collective in (dist.all_reduce, lambda x: dist.broadcast(x, 0)):
        with refuses("cannot send or receive a ScaledTensor", TypeError):
            collective(x)


def test_a_second_derivative_is_plain():
    w = weight()
    (first,) = torch.autograd.grad(loss(w), w, create_graph=True)
    assert type(first) is torch.Tensor
    first.square().sum().backward()
    assert w.grad.isfinite().all()
