"""Activations that keep their input in FP8: outputs, gradients at the rounded input, memory."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fp8
import unit_scaling as uu
import unit_scaling.functional as U
from fp8 import Cast, Recipe
from tests.fp8.compare import assert_near, assert_same, bytes_kept, outcome

RECIPES = {
    name: dataclasses.replace(recipe, saved_activations=recipe.input)
    for name, recipe in fp8.RECIPES.items()
    if name in ("unit", "tensor")
}
DTYPES = (torch.float32, torch.bfloat16)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(shape, generator=generator)).to(dtype).requires_grad_()


def gate(x: Tensor) -> Tensor:
    return x * x.flip(0)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "silu in place": lambda x: F.silu(x + 0, inplace=True),
    "glu": F.glu,
    "glu of rows": partial(F.glu, dim=0),
    "gate": gate,
    "gate, torch.mul": lambda x: torch.mul(x, x.flip(0)),
    "gate, method": lambda x: x.mul(x.flip(0)),
}
RELUS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "torch.relu": torch.relu,
    "method": Tensor.relu,
    "in place": lambda x: F.relu(x + 0, inplace=True),
    "relu_": lambda x: (x + 0).relu_(),
}


def rounded(x: Tensor, cast: Cast) -> Tensor:
    """``x`` as it is kept, by a slow definition: under the smallest power of two that fits."""
    if cast.scaling == "unit":
        return fp8.quantize(x, cast.format)
    scale = 2.0 ** torch.ceil(torch.log2(x.detach().abs().max().double() / 448)).item()
    return fp8.quantize(x, cast.format, scale=scale)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_output_is_torchs_and_the_gradient_that_at_the_rounded_input(activation, name, dtype):
    f, recipe = ACTIVATIONS[activation], RECIPES[name]
    x = randn(6, 10, dtype=dtype)
    with fp8.autocast(recipe):
        y = f(x)
    assert torch.equal(y, f(x))
    g = randn(*y.shape, seed=1, dtype=dtype).detach()
    (got,) = torch.autograd.grad(y, x, g)
    near = rounded(x, recipe.saved_activations).detach().requires_grad_()
    (want,) = torch.autograd.grad(f(near), near, g)
    assert torch.equal(got, want)
    assert not torch.equal(got, torch.autograd.grad(f(x), x, g)[0])


@pytest.mark.parametrize("shape", [(0,), (1,), (7,), (8,), (3, 5), (2, 3, 4)])
@pytest.mark.parametrize("relu", RELUS)
def test_relu_keeps_a_bit_for_each_element_and_loses_nothing(relu, shape):
    x = randn(*shape)
    with torch.no_grad():
        x.view(-1)[::5] = torch.tensor(float("nan"))
        x.view(-1)[1::5] = -0.0
        x.view(-1)[2::5] = 1e-30
    with fp8.autocast(RECIPES["unit"]):
        y = RELUS[relu](x)
    g = randn(*shape, seed=1).detach()
    g.view(-1)[1::2] = float("inf")
    torch.testing.assert_close(y, F.relu(x), equal_nan=True, rtol=0, atol=0)
    got, want = (torch.autograd.grad(z, x, g)[0] for z in (y, F.relu(x)))
    torch.testing.assert_close(got, want, equal_nan=True, rtol=0, atol=0)


class MLP(nn.Module):
    def __init__(self, kind: str, dtype: torch.dtype = torch.float32, width: int = 64) -> None:
        super().__init__()
        self.kind = kind
        make = partial(nn.Linear, bias=False, dtype=dtype)
        self.up, self.down = make(width, 4 * width), make(4 * width, width)
        self.gate = make(width, 4 * width) if "glu" in kind else None

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        if self.kind == "swiglu":
            return self.down(F.silu(self.gate(x)) * up)
        if self.kind == "U.silu_glu":
            return self.down(U.silu_glu(up, self.gate(x)))
        functions = {"gelu": F.gelu, "relu": F.relu, "U.gelu": U.gelu, "U.relu": U.relu}
        return self.down(functions[self.kind](up))


@pytest.mark.parametrize(
    ("name", "backend", "dtype", "most"),
    [
        ("tensor", "simulate", torch.float32, 0.35),
        ("unit", "native", torch.bfloat16, 0.6),
        ("tensor", "simulate", None, 0.6),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["gelu", "swiglu", "relu", "U.gelu", "U.silu_glu", "U.relu"])
def test_what_a_whole_mlp_keeps(kind, name, backend, dtype, most):
    """Of what torch keeps. dtype None: float32 under torch.autocast."""
    model, x = MLP(kind, dtype or torch.float32), randn(512, 64, dtype=dtype or torch.float32)
    plain = MLP(kind.replace("U.silu_glu", "swiglu").removeprefix("U."), dtype or torch.float32)

    def run() -> Tensor:
        with fp8.autocast(RECIPES[name], backend=backend):
            return model(x)

    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is None):
        assert bytes_kept(run) <= most * bytes_kept(lambda: plain(x))


@pytest.mark.parametrize(
    ("kind", "dtype", "backend", "compiler"),
    [  # The first compiler is inductor's choice of what to keep, without its kernels.
        pytest.param(
            *("gelu", torch.bfloat16, "native", "aot_eager_decomp_partition"),
            marks=pytest.mark.native(whole_graph=True),
        ),
        ("swiglu", None, "simulate", "aot_eager_decomp_partition"),
    ],
    ids=str,
)
def test_what_a_compiled_mlp_keeps(kind, dtype, backend, compiler):
    """At most what it keeps in eager mode, parameters aside. dtype None as above."""
    torch.compiler.reset()
    model, x = MLP(kind, dtype or torch.float32), randn(512, 64, dtype=dtype or torch.float32)

    def run() -> Tensor:
        with (
            torch.autocast("cpu", torch.bfloat16, enabled=dtype is None),
            fp8.autocast(RECIPES["tensor"], backend=backend),
        ):
            return model(x)

    compiled = torch.compile(run, fullgraph=True, backend=compiler)
    compiled()
    assert bytes_kept(compiled, beside=model.parameters()) <= bytes_kept(run)


def test_compiled_in_one_piece():
    torch.compiler.reset()  # torch keeps a few compiled forms of a function only
    model, x = MLP("swiglu", width=16), randn(9, 16)

    def run(x: Tensor) -> Tensor:
        with fp8.autocast(RECIPES["unit"]):
            return model(x)

    compiled = torch.compile(run, fullgraph=True, backend="eager")
    leaves = [x, *model.parameters()]
    assert_near(*(outcome(lambda f=f: f(x), leaves) for f in (compiled, run)))
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), run(x))


@pytest.mark.parametrize("kind", ["swiglu", "relu"])
def test_checkpointed(kind):
    model, x = MLP(kind, width=16), randn(8, 16)
    how = {"use_reentrant": False, "context_fn": fp8.checkpoint_contexts}
    with fp8.autocast(RECIPES["tensor"]):
        ys = model(x), checkpoint(model, x, **how)
    leaves = [x, *model.parameters()]
    assert_same(*(torch.autograd.grad(y.square().sum(), leaves) for y in ys))


def test_twice_differentiated():
    """At the rounded input."""
    x, recipe = randn(5), RECIPES["unit"]
    with fp8.autocast(recipe):
        y = F.silu(x)
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    near = fp8.quantize(x.detach(), "e4m3")
    want = torch.func.grad(lambda x: torch.func.grad(lambda x: F.silu(x).sum())(x).sum())(near)
    torch.testing.assert_close(second, want)


def test_what_is_left_to_torch():
    """Without the option; where nothing is kept; factors of another shape, squares, numbers."""
    x, scale = randn(6, 10), randn(10)
    saved = bytes_kept(lambda: F.gelu(x))
    with fp8.autocast("unit"):
        assert bytes_kept(lambda: F.gelu(x)) == saved
    with fp8.autocast(RECIPES["unit"]):
        assert bytes_kept(lambda: F.gelu(x)) == saved / 4
        (got,) = torch.autograd.grad((x * scale).sum() + (x * x).sum() + (2 * x).sum(), scale)
        with torch.no_grad():
            assert torch.equal(F.gelu(x), F.gelu(x.detach()))
        assert torch.equal(torch.tensor([2, 3]) * torch.tensor([2, 3]), torch.tensor([4, 9]))
    assert torch.equal(got, x.sum(0))


def test_convert_takes_the_modules_of_activations_where_the_recipe_asks():
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.ReLU(), uu.SiLU())
    fp8.convert(model, RECIPES["tensor"], backend="simulate")
    rows = {row.path: (row.done, row.why) for row in fp8.report(model)}
    assert rows["1"] == rows["4"] == ("converted", "tensor, keeps e4m3, tensor")
    assert rows["3"] == ("converted", "tensor, keeps bits")
    assert isinstance(model[1], nn.GELU)
    x = randn(8, 16)
    with fp8.autocast(RECIPES["tensor"]):
        want = torch.autograd.grad(fp8.revert(model)(x).sum(), x)
    fp8.convert(model, RECIPES["tensor"], backend="simulate")
    assert torch.equal(torch.autograd.grad(model(x).sum(), x)[0], want[0])
    fp8.convert(model, "tensor")
    assert "1" not in {row.path for row in fp8.report(model)}


def test_recipes_with_saved_activations_are_checked_and_written():
    recipe = RECIPES["tensor"]
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe
    with pytest.raises(TypeError, match="saved_activations must be a Cast or None"):
        Recipe(name="wrong", saved_activations="e4m3")
    for scaling in ("row", "mx", "delayed"):
        with pytest.raises(ValueError, match=r'saved_activations needs scaling "unit" or "tensor"'):
            Recipe(name="wrong", saved_activations=Cast(format="e4m3", scaling=scaling))
