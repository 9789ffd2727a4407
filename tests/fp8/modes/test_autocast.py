import contextlib
import warnings
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fp8
from fp8 import Recipe
from fp8.modes.dispatch import COMPOSED, PRODUCTS
from fp8.products.active import product_recipe
from fp8.recipes.recipe import get_recipe
from tests.fp8.calls import CALLS, COARSE, MATMUL, OFF, cast, forms, operands
from tests.shared import (
    assert_close,
    assert_same,
    in_one_graph,
    normal,
    pairs,
    parametrize,
    proves,
    randn,
    refuses,
)


def test_every_row_of_products_is_here():
    # torch has no gradients of the one on CPUs, and no float64 of the other: see test_products.py
    # and test_grouped.py.
    elsewhere = {torch.ops.higher_order.flex_attention, F.grouped_mm, torch._grouped_mm}
    assert set(CALLS) == set(PRODUCTS) - elsewhere


@parametrize("dtype", [torch.float32, torch.bfloat16])
@parametrize("function", CALLS)
def test_rows(function, dtype):
    """In every form: the product of the operands cast, in the operands' dtype."""
    row = CALLS[function]
    casts = [getattr(COARSE, kind, None) for kind in row.kinds]
    rounded = [cast(t, c) for t, c in pairs(operands(row, dtype), casts)]
    expected = function(*row.before, *rounded, **row.kwargs)
    plain = function(*row.before, *operands(row, dtype), **row.kwargs)
    assert not torch.allclose(expected, plain)
    near = {"rtol": 2**-6, "atol": 2**-6 * float(expected.abs().max())}
    near = near if dtype == torch.bfloat16 else {}
    for form, _ in forms(function, row, operands(row, dtype)):
        call = dict(forms(function, row, operands(row, dtype)))[form]
        with fp8.autocast(COARSE):
            y = call()
        assert y.dtype == dtype
        assert_close(y, expected, **near)
        assert_same(call(), plain)  # the block is over


@proves("the field", "attention in FP8")
@parametrize("function", CALLS)
def test_gradients(function):
    """Of each operand: what the product's own backward makes of cast operands and gradient."""
    row = CALLS[function]
    casts = [getattr(COARSE, kind, None) for kind in row.kinds]
    got, expected = (
        [t.double().requires_grad_() for t in operands(row)] for _ in range(2)
    )
    with fp8.autocast(COARSE):
        y = function(*row.before, *got, **row.kwargs)
    straight = [
        t if c is None else t + (cast(t.detach(), c) - t).detach()
        for t, c in pairs(expected, casts)
    ]
    z = function(*row.before, *straight, **row.kwargs)
    g = normal(*y.shape, seed=9).double() * OFF
    grads = torch.autograd.grad(y, got, g)
    wanted = torch.autograd.grad(z, expected, cast(g, COARSE.grad), retain_graph=True)
    exact = torch.autograd.grad(z, expected, g)
    for one, rounded, untouched, kind in pairs(grads, wanted, exact, row.kinds):
        assert_close(one, untouched if kind == "none" else rounded)


WITH_OUT = [torch.matmul, torch.linalg.matmul, torch.mm, torch.bmm, torch.mv]
WITH_OUT += [torch.addmm, torch.baddbmm]


@parametrize("function", WITH_OUT)
def test_out_is_refused_by_name(function):
    row = CALLS[function]
    with fp8.autocast("unit"), refuses("cannot write to out="):
        function(*operands(row), **row.kwargs, out=torch.empty(0))


# --- what cannot be reached


@parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_recurrent_layers_stay_in_high_precision(kind):
    layer, x = kind(4, 4), randn(3, 4)
    name = kind.__name__.lower().replace("rnn", "rnn_tanh").replace("cell", "_cell")
    expected = layer(x)[0]
    warns = pytest.warns(
        fp8.warnings.RecipeWarning, match=f"^{name} stays .*step by step"
    )
    with fp8.autocast("unit"), warns:
        assert_same(layer(x)[0], expected)


LEFT_CALLS = {
    "linalg_multi_dot": lambda x: torch.linalg.multi_dot([x, x.mT, x]),
    "cdist": lambda x: torch.cdist(x, x),
    "affine_grid": lambda x: F.affine_grid(
        x[:4].view(-1, 2, 3), (4, 1, 2, 2), align_corners=False
    ),
    "cov": lambda x: x.cov(),
    "corrcoef": torch.corrcoef,
    "linalg_solve_triangular": lambda x: torch.linalg.solve_triangular(
        x[:6].tril() + 3 * torch.eye(6), x.mT, upper=False
    ),
    "linalg_solve": lambda x: torch.linalg.solve(x[:6] + 3 * torch.eye(6), x.mT),
    "cholesky_solve": lambda x: x.mT.cholesky_solve(x[:6].tril() + 3 * torch.eye(6)),
    "linalg_matrix_power": lambda x: torch.linalg.matrix_power(x[:6], 3),
    "triplet_margin_with_distance_loss": lambda x: F.triplet_margin_with_distance_loss(
        x, x.flip(0), x + 1, distance_function=lambda a, b: (a @ b.mT).diagonal()
    ),
}


@parametrize("name", LEFT_CALLS)
def test_calls_with_products_inside_are_left_and_named_once(name):
    """Their products are in high precision by design: a warning says so, not an error."""
    x = randn(30, 6)
    expected = LEFT_CALLS[name](x)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        for _ in range(2):
            with fp8.autocast("unit"):
                assert_same(LEFT_CALLS[name](x), expected)
    (warning,) = shown
    assert issubclass(warning.category, fp8.warnings.RecipeWarning)
    assert str(warning.message).startswith(
        f"{name} stays in high precision under fp8.autocast: "
    )
    assert warning.filename == __file__
    with fp8.strict(), fp8.autocast("unit"), refuses(name, fp8.warnings.RecipeWarning):
        LEFT_CALLS[name](x)


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch 2.13 has it")
@parametrize(
    "given",
    [
        {},
        {"reduction": "sum", "ignore_index": 1},
        {"label_smoothing": 0.1, "linear_bias": True},
    ],
)
def test_a_loss_that_contains_the_last_product_is_composed(given):
    x, w, y = randn(7, 8), randn(5, 8, seed=1), torch.arange(7) % 5
    given = {**given, "linear_bias": normal(5)} if "linear_bias" in given else given
    assert_close(
        COMPOSED[F.linear_cross_entropy](x, w, y, **given),
        F.linear_cross_entropy(x, w, y, **given),
    )
    bias = given.pop("linear_bias", None)
    with fp8.autocast(COARSE):
        expected = F.cross_entropy(F.linear(x, w, bias), y, **given)
        found = F.linear_cross_entropy(x, w, y, linear_bias=bias, **given)
    assert_same(found, expected)


# --- blocks


def test_nested_blocks():
    x, w = normal(5, 8), normal(6, 8)

    def product(recipe):
        recipe = get_recipe(recipe)
        return F.linear(cast(x, recipe.input), cast(w, recipe.weight))

    none, plain = Recipe(name="none"), F.linear(x, w)
    with fp8.autocast("unit"):
        assert_close(F.linear(x, w), product("unit"))
        with fp8.autocast(COARSE) as mode:
            assert_close(F.linear(x, w), product(COARSE))
            with mode, fp8.autocast(none):
                assert_same(F.linear(x, w), plain)
                assert product_recipe() is none
            assert_close(F.linear(x, w), product(COARSE))
        with pytest.raises(RuntimeError), fp8.autocast(COARSE):
            F.linear(x, w.double())
        assert product_recipe() is fp8.RECIPES["unit"]
    assert product_recipe() is None


@parametrize("given", [{"recipe": "unit"}, {"enabled": False}])
def test_as_a_decorator(given):
    x, w = normal(5, 8), normal(6, 8)
    with fp8.autocast(**given):
        expected = F.linear(x, w)

    @fp8.autocast(**given)
    def product(x):
        return F.linear(x, w)

    with fp8.autocast(COARSE):
        assert_same(product(x), expected)
    assert_same(in_one_graph(product, "eager")(x), expected)
    assert product.__name__ == "product"

    def late():
        yield

    with refuses("late goes on after its call: open the block inside", TypeError):
        fp8.autocast(**given)(late)


def test_a_block_made_outside_of_what_is_compiled():
    """Before torch 2.14 the compiler opened torch's mode without ours, and nothing was cast."""
    x, block = normal(5, 8), fp8.autocast("unit")

    def product(x):
        with block:
            return x @ x.T

    assert not torch.equal(product(x), x @ x.T)
    compiled = torch.compile(product, backend="eager")  # breaks the graph there
    assert_same(compiled(x), product(x))
    torch.compiler.reset()
    whole = in_one_graph(product, "eager")
    if torch.__version__ >= (2, 14):
        assert_same(whole(x), product(x))
        return
    with refuses("autocast", RuntimeError):
        whole(x)


class Counting(Counter):
    """The casts that take place, by format and dtype of what is cast."""

    def __init__(self, monkeypatch):
        super().__init__()
        plain = fp8.casts.casting._rounded

        def counted(x, scale, spec, *args):
            self[spec.format] += 1
            return plain(x, scale, spec, *args)

        monkeypatch.setattr(fp8.casts.casting, "_rounded", counted)


@parametrize("function", CALLS)
def test_everything_is_cast_once_also_when_backward_runs_inside(function, monkeypatch):
    row, counts = CALLS[function], Counting(monkeypatch)
    tensors = [t.requires_grad_() for t in operands(row)]
    tensors = [tensors[0] * 1, *tensors[1:]]
    with fp8.autocast(COARSE), fp8.autocast(COARSE):
        function(*row.before, *tensors, **row.kwargs).sum().backward()
    kinds = Counter(
        getattr(COARSE, kind).format for kind in row.kinds if kind != "none"
    )
    assert counts == kinds + Counter([COARSE.grad.format])


# --- with other parts of torch


@parametrize("function", CALLS)
def test_torch_autocast(function):
    """The result has autocast's dtype where torch's own has, whichever block is the outer one."""
    row = CALLS[function]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = function(*row.before, *operands(row), **row.kwargs)
        with fp8.autocast("unit"):
            y = function(*row.before, *operands(row), **row.kwargs)
    with fp8.autocast("unit"), torch.autocast("cpu", dtype=torch.bfloat16):
        z = function(*row.before, *operands(row), **row.kwargs)
    assert_same(y, z)
    if not function.__name__.endswith("mv"):  # unknown to torch.autocast
        assert y.dtype == plain.dtype


@parametrize("around", [contextlib.nullcontext, lambda: fp8.autocast("unit")])
def test_disabled_it_computes_as_torch_does(around):
    a, b = operands(MATMUL)
    lstm, x = nn.LSTM(4, 4), torch.randn(3, 4)

    def product(a, b):
        with around(), fp8.autocast("delayed", enabled=False):
            return a @ b

    assert_same(product(a, b), a @ b)
    assert_same(in_one_graph(product, "eager")(a, b), a @ b)
    with around(), fp8.autocast(enabled=False):
        assert_same(lstm(x)[0], lstm(x)[0])
        assert_same(torch.mm(x, x.T, out=torch.empty(3, 3)), x @ x.T)
        checkpoint(
            torch.matmul, a.requires_grad_(), b, use_reentrant=True
        ).sum().backward()
