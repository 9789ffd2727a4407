"""What has no scale is as in torch: integers, numbers to add, arguments that torch refuses."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fp8
import unit_scaling.functional as U
from unit_scaling.rules.table import OPS, find_op


def counts(*shape: int) -> Tensor:
    return torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape)


#: Operations on integers that torch has: ours, torch's, arguments.
OF_INTEGERS = {
    "matmul": (U.matmul, torch.matmul, (counts(2, 3), counts(3, 2))),
    "matmul of vectors": (U.matmul, torch.matmul, (counts(3), counts(3))),
    "matmul of batches": (U.matmul, torch.matmul, (counts(2, 2, 3), counts(2, 3, 4))),
    "linear": (U.linear, F.linear, (counts(2, 3), counts(4, 3), counts(4))),
    "addmm": (U.addmm, torch.addmm, (counts(2, 2), counts(2, 3), counts(3, 2))),
    "addmm with a bias": (U.addmm, torch.addmm, (counts(2), counts(2, 3), counts(3, 2))),
    "einsum": (U.einsum, torch.einsum, ("ij,jk->ki", counts(2, 3), counts(3, 2))),
    "bilinear": (U.bilinear, F.bilinear, (counts(2, 3), counts(2, 2), counts(4, 3, 2))),
    "addcmul": (U.addcmul, torch.addcmul, (counts(4), counts(4), counts(4))),
    "max_pool2d": (U.max_pool2d, F.max_pool2d, (counts(1, 4, 4), 2)),
    "avg_pool1d": (U.avg_pool1d, F.avg_pool1d, (counts(1, 4, 4), 2)),
    "avg_pool2d": (U.avg_pool2d, F.avg_pool2d, (counts(1, 4, 4), 2)),
    "pow": (U.pow, torch.pow, (counts(4), 2)),
}


@pytest.mark.parametrize("name", OF_INTEGERS)
def test_integers_are_not_scaled(name: str) -> None:
    """A factor would make them floats, or truncate what it makes of them."""
    ours, plain, args = OF_INTEGERS[name]
    result, expected = ours(*args), plain(*args)
    assert result.dtype == expected.dtype == torch.int64
    assert torch.equal(result, expected)


def test_weights_of_a_sum_of_integers() -> None:
    args = (counts(2, 2), counts(2, 3), counts(3, 2))
    expected = torch.addmm(*args, beta=2, alpha=3)
    assert torch.equal(U.addmm(*args, beta=2, alpha=3), expected)


@pytest.mark.parametrize(
    "func", [torch.dot, torch.vdot, torch.Tensor.vdot, torch.linalg.vecdot, torch.inner]
)
def test_complex_products_are_scaled_as_real_ones_and_conjugated_as_in_torch(func) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(2, 16, dtype=torch.complex128)
    result = find_op(func).call((x, y), {}, func=func)
    torch.testing.assert_close(result, func(x, y) / 4)


COMPLEX = {
    "matmul": (torch.matmul, (3, 4), (4, 5)),
    "matmul of batches": (torch.matmul, (2, 3, 4), (2, 4, 5)),
    "linear": (F.linear, (3, 4), (5, 4), (5,)),
    "einsum": (lambda *tensors: torch.einsum("bi,io->bo", *tensors), (3, 4), (4, 5)),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("name", COMPLEX)
def test_gradients_of_complex_products(name: str, enabled: bool, compiled: bool) -> None:
    """Parallel to torch's, which are those of the conjugates; a recipe casts none of it."""
    plain, *shapes = COMPLEX[name]
    torch.manual_seed(0)
    operands = [torch.randn(shape, dtype=torch.complex128, requires_grad=True) for shape in shapes]
    expected = plain(*operands)
    grad = torch.randn_like(expected)
    references = torch.autograd.grad(expected, operands, grad)

    def ours(*tensors: Tensor) -> Tensor:
        with fp8.autocast("unit", enabled=enabled):
            if name == "einsum":
                return U.einsum("bi,io->bo", *tensors)
            return U.linear(*tensors) if name == "linear" else U.matmul(*tensors)

    run = torch.compile(ours, backend="aot_eager", fullgraph=True) if compiled else ours
    result = run(*operands)
    torch.testing.assert_close(result, expected / 2)
    found = torch.autograd.grad(result, operands, grad)
    for mine, reference in zip(found, references, strict=True):
        factor = mine.norm() / reference.norm()
        torch.testing.assert_close(mine, reference * factor)


@pytest.mark.parametrize("in_place", ["add_", "sub_", "mul_", "div_", "tanh_", "sigmoid_"])
def test_what_integers_cannot_hold_is_not_written_to_them(in_place: str) -> None:
    args = () if in_place in ("tanh_", "sigmoid_") else (0.5,)
    op, method = OPS[in_place[:-1]], getattr(torch.Tensor, in_place)
    with pytest.raises(RuntimeError, match="can't be cast"):
        method(counts(3), *args)
    x = counts(3)
    with pytest.raises(TypeError, match=r"torch.float32 cannot be written .* torch.int64"):
        op.call((x, *args), {}, func=method)
    assert torch.equal(x, counts(3))


def test_integers_in_place() -> None:
    x = -counts(3)
    assert U.relu(x, inplace=True) is x
    assert torch.equal(x, torch.zeros_like(x))


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.float64, torch.bfloat16, torch.complex64], ids=str
)
def test_a_bias_of_another_dtype_is_an_error(dtype: torch.dtype) -> None:
    """As in torch; a factor of an integer would have made it a float."""
    x, w, bias = torch.ones(2, 3), torch.ones(4, 3), torch.ones(4).to(dtype)
    for library in (F, U):
        with pytest.raises(RuntimeError, match="type"):
            library.linear(x, w, bias)
        with pytest.raises(RuntimeError, match="type"):
            library.bilinear(x, x, torch.ones(4, 3, 3), bias)
        with pytest.raises((RuntimeError, ValueError), match="type"):
            library.conv1d(torch.ones(2, 3, 8), torch.ones(4, 3, 3), bias)


def test_a_tensor_is_no_sequence_of_tensors() -> None:
    for function in (U.cat, U.stack, torch.cat, torch.stack):
        with pytest.raises(TypeError, match="tuple of Tensors"):
            function(torch.ones(2, 3))


def test_settings_that_torch_refuses() -> None:
    x = torch.ones(1, 3, 8)
    for library in (F, U):
        with pytest.raises(RuntimeError, match="non-positive values for delta"):
            library.huber_loss(x, x, delta=0.0)
        with pytest.raises(RuntimeError, match="stride must be greater than zero"):
            library.max_pool1d(x, 2, 0)
    with pytest.raises(ValueError, match="normalize needs p above 0: got -1"):
        U.normalize(x, p=-1)


@pytest.mark.parametrize("stride", [(), []], ids=repr)
def test_an_empty_stride_is_that_of_the_kernel(stride: tuple[()] | list[int]) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 6, 6)
    expected = U.avg_pool2d(x, 2, 2)
    torch.testing.assert_close(U.avg_pool2d(x, (2, 2), stride, [0]), expected)
    torch.testing.assert_close(U.avg_pool1d(x[0], [2], stride), U.avg_pool1d(x[0], 2, 2))


def test_reversed_difference_with_a_weight() -> None:
    x, y = torch.randn(2, 5, dtype=torch.float64)
    for func in (torch.rsub, torch.Tensor.__rsub__):
        result = OPS["sub"].call((x, y), {"alpha": 2}, func=func)
        torch.testing.assert_close(result, torch.rsub(x, y, alpha=2) / 5**0.5)


@pytest.mark.parametrize("constraint", ["to_output_scale", None])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_a_tensor_of_one_element_is_a_number_to_add(
    shape: tuple[int, ...], constraint: str | None
) -> None:
    """It adds to the mean alone, and collects the gradients of all that it is added to."""
    torch.manual_seed(0)
    one, x = torch.full(shape, 5.0, requires_grad=True), torch.randn(64, 32, requires_grad=True)
    grad = torch.randn(64, 32)
    for output in (U.add(one, x, constraint), U.sub(x, -one, constraint)):
        torch.testing.assert_close(output, one + x)
        one.grad = x.grad = None
        output.backward(grad)
        torch.testing.assert_close(x.grad, grad)
        collected = grad.sum() if constraint else grad.sum() / (64 * 32) ** 0.5
        torch.testing.assert_close(one.grad, collected.reshape(shape))


def test_sums_of_one_row_are_scaled_as_those_of_many() -> None:
    one = torch.tensor([[1.0]])
    torch.testing.assert_close(U.add(one, one), one * 2**0.5)
