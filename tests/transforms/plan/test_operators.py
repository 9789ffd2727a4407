"""Operators of other libraries and autograd functions, whose products no rule sees."""

import warnings

import pytest
import torch
from torch import Tensor, nn

import fp8
import unit_scaling as uu
from unit_scaling.transforms import simulate_fp8, unit_scale


@torch.library.custom_op("unit_scaling_tests::linear", mutates_args=())
def linear(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.mT


@linear.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


linear.register_autograd(
    lambda ctx, g: (g @ ctx.saved_tensors[1], g.mT @ ctx.saved_tensors[0]),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        return linear(torch.relu(self.first(x)), self.last.weight)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.mT

    @staticmethod
    def backward(ctx, g):
        x, weight = ctx.saved_tensors
        return g @ weight, g.mT @ x


X = torch.randn(5, 8)


def test_its_weight_keeps_its_values():
    plain = Model()
    model = unit_scale(plain)
    model(X)
    torch.testing.assert_close(model.last.weight, plain.last.weight)
    (row,) = (r for r in uu.report(model) if r.done == "keeps its values")
    assert (row.path, row.call) == ("last", "weight")


def compiled(model):
    return torch.compile(model, backend="eager", fullgraph=True)


@pytest.mark.parametrize("make", [simulate_fp8, lambda m: compiled(simulate_fp8(m))])
def test_that_its_products_are_not_cast_is_a_warning(make):
    model = make(Model())
    with pytest.warns(
        fp8.warnings.RecipeWarning, match="unit_scaling_tests.linear.default is an operator"
    ):
        model(X)


def test_an_autograd_function_s_own_backward_pass_is_a_warning():
    x, weight = X.clone().requires_grad_(), torch.randn(4, 8)
    with (
        fp8.autocast("unit"),
        pytest.warns(fp8.warnings.RecipeWarning, match="function Product computes"),
    ):
        Product.apply(x * 2, weight)
    with fp8.autocast("unit"), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        (x * 2) @ weight.mT
