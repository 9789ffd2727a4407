"""Operators of other libraries and autograd functions, whose products no rule sees."""

import warnings

import pytest
import torch
from torch import Tensor, nn

import fp8
import unit_scaling as uu
from tests.transforms.models import Net, own
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


def model():
    layers = {"first": nn.Linear(8, 16), "last": nn.Linear(16, 4)}
    return Net(lambda m, x: linear(torch.relu(m.first(x)), m.last.weight), **layers)


product = own(lambda x, weight: x @ weight.mT, lambda g, x, weight: (g @ weight, g.mT @ x))
X = torch.randn(5, 8)


def test_its_weight_keeps_its_values():
    plain = model()
    ours = unit_scale(plain)
    ours(X)
    torch.testing.assert_close(ours.last.weight, plain.last.weight)
    (row,) = (r for r in uu.report(ours) if r.done == "keeps its values")
    assert (row.path, row.call) == ("last", "weight")


@pytest.mark.parametrize("then", ["formula", "head", "norm", "shape", "hidden state"])
def test_a_table_whose_rows_make_the_output_keeps_its_values(then):
    """The sizes that a factorization machine begins with are its own; others are found again."""
    torch.manual_seed(0)
    rows = nn.Embedding(16, 8)
    nn.init.normal_(rows.weight, std=0.1)

    def forward(m, x):
        pairs = m.rows(x).prod(1)
        if then == "shape":
            return m.head(pairs)[: len(pairs[:, -1])]
        if then in ("head", "hidden state"):
            return m.head(pairs), *[pairs][: then != "head"]
        return nn.functional.layer_norm(pairs, (8,)) if then == "norm" else pairs.sum(-1)

    plain, x = Net(forward, rows=rows, head=nn.Linear(8, 2)), torch.randint(16, (32, 2))
    ours = unit_scale(plain)
    y = ours(x)
    kept = torch.allclose(ours.rows.weight, plain.rows.weight)  # divided, and multiplied again
    assert kept == (then == "formula") == torch.allclose(y[0], plain(x)[0])


def compiled(model):
    return torch.compile(model, backend="eager", fullgraph=True)


@pytest.mark.parametrize("make", [simulate_fp8, lambda m: compiled(simulate_fp8(m))])
def test_that_its_products_are_not_cast_is_a_warning(make):
    ours = make(model())
    with pytest.warns(
        fp8.warnings.RecipeWarning,
        match="unit_scaling_tests.linear.default stays in high precision",
    ):
        ours(X)


def test_an_autograd_function_s_own_backward_pass_is_a_warning():
    x, weight = X.clone().requires_grad_(), torch.randn(4, 8)
    with (
        fp8.autocast("unit"),
        pytest.warns(fp8.warnings.RecipeWarning, match="function Function computes"),
    ):
        product(x * 2, weight)
    with fp8.autocast("unit"), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        (x * 2) @ weight.mT
