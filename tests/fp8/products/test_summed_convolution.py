"""Convolutions whose sums are those of a tensor core: products of what torch unfolds."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fp8
from fp8.products.convolution import conv, conv_transpose
from fp8.products.matmul import linear
from fp8.recipes.cast import Cast
from fp8.recipes.recipe import Recipe
from tests.fp8.compare import assert_same, outcome

ONE = Cast(format="e4m3", scaling="tensor")
HOPPER = Recipe(name="one", input=ONE, weight=ONE, grad=ONE, accumulate="hopper")
FNUZ = Cast(format="e4m3fnuz", scaling="tensor")
CDNA3 = Recipe(name="amd", input=FNUZ, weight=FNUZ, grad=FNUZ, accumulate="cdna3")
FORMATS = dataclasses.replace(
    fp8.RECIPES["tensor"], accumulate="ada", grad_weight_input=Cast(format="e5m2", scaling="tensor")
)

CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "1d": ((2, 24, 9), (6, 24, 3), {}),
    "1d stride": ((2, 8, 11), (6, 4, 4), {"stride": 3, "padding": 2, "groups": 2}),
    "1d dilation": ((2, 8, 11), (6, 8, 3), {"dilation": 2, "padding": 2}),
    "2d": ((2, 24, 5, 6), (6, 24, 3, 2), {"padding": (1, 0)}),
    "2d stride": ((2, 8, 7, 6), (4, 8, 3, 3), {"stride": (2, 1), "padding": 1}),
    "2d not all is read": ((2, 8, 8, 6), (4, 8, 1, 1), {"stride": 1}),
    "2d depthwise": ((2, 6, 5, 6), (6, 1, 3, 3), {"padding": 1, "groups": 6}),
    "2d dilation": ((3, 8, 9, 7), (4, 8, 2, 3), {"dilation": (3, 2), "padding": (2, 1)}),
}

each_case = pytest.mark.parametrize("case", CASES)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def pair(value: Any, other: int) -> tuple[int, int]:
    """A setting of both dimensions; of a convolution in 1d, ``other`` for the one that is added."""
    return value if isinstance(value, tuple) else (other, value)


class Unfolded:
    """A case as products of matrices, for each group of channels."""

    def __init__(self, case: str):
        x, w, given = CASES[case]
        flat = len(x) == 3
        self.groups = given.get("groups", 1)
        self.kernel = (1, w[2]) if flat else w[2:]
        self.size = (1, x[2]) if flat else x[2:]
        both = {"stride": 1, "padding": 0, "dilation": 1} | given
        self.stride, self.padding, self.dilation = (
            pair(both[name], none) if flat or isinstance(both[name], tuple) else (both[name],) * 2
            for name, none in (("stride", 1), ("padding", 0), ("dilation", 1))
        )

    def rows(self, maps: Tensor, padding: Any, stride: Any) -> Tensor:
        """(groups, batch * positions, kernel positions * channels) of maps (batch, channels, h, w),
        by torch."""
        taps = self.kernel[0] * self.kernel[1]
        found = F.unfold(F.pad(maps, padding), self.kernel, self.dilation, 0, stride)
        found = found.unflatten(1, (self.groups, -1, taps))  # (batch, groups, channels, taps, at)
        return found.permute(1, 0, 4, 3, 2).flatten(3).flatten(1, 2)

    def of_input(self, x: Tensor) -> Tensor:
        high, wide = self.padding
        return self.rows(x.reshape(*x.shape[:2], *self.size), (wide, wide, high, high), self.stride)

    def of_grad(self, grad: Tensor) -> Tensor:
        """What each input reads of the output's gradient: kernel positions in reverse, with zeros
        between the gradients."""
        grad = grad.reshape(*grad.shape[:2], -1, grad.shape[-1])
        sizes = [(n - 1) * s + 1 for n, s in zip(grad.shape[2:], self.stride, strict=True)]
        apart = grad.new_zeros(*grad.shape[:2], *sizes)
        apart[..., :: self.stride[0], :: self.stride[1]] = grad
        edges = []
        for d in (1, 0):
            reach = self.dilation[d] * (self.kernel[d] - 1)
            before = reach - self.padding[d]
            edges += [before, self.size[d] + reach - before - sizes[d]]
        rows = self.rows(apart, edges, 1)
        taps = self.kernel[0] * self.kernel[1]
        return rows.unflatten(2, (taps, -1)).flip(2).flatten(2)


def matrices(w: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """The weight of the product, (groups, outputs, taps * channels), and that of the input
    gradient, (groups, channels, taps * outputs)."""
    w = w.unflatten(0, (groups, -1)).flatten(3)
    return w.transpose(2, 3).flatten(2), w.permute(0, 2, 3, 1).flatten(2)


@pytest.mark.parametrize("recipe", [HOPPER, CDNA3], ids=lambda recipe: recipe.name)
@each_case
def test_is_the_product_of_what_is_unfolded(case, recipe):
    """Bit for bit, forward and both gradients: with one scale for each operand, which that of its
    unfolded copy is too."""
    shape, kernel, given = CASES[case]
    x, w = randn(*shape), randn(*kernel, seed=1)
    with fp8.autocast(recipe):
        y = conv(x, w, **given)
    g = randn(*y.shape, seed=2).detach()
    plain = Unfolded(case)
    for dim, got in enumerate(outcome(lambda: y, (x, w), g)):
        wanted = expected(dim, plain, x.detach(), w.detach(), g, recipe)
        assert torch.equal(got, wanted.reshape(got.shape)), dim


def expected(dim: int, plain: Unfolded, x: Tensor, w: Tensor, g: Tensor, recipe: Recipe) -> Tensor:
    """The output (0), the gradient of the input (1) or of the weight (2)."""
    of_output, of_input = matrices(w, plain.groups)
    grads = g.flatten(2).unflatten(1, (plain.groups, -1)).permute(1, 0, 3, 2).flatten(1, 2)
    operands = [
        (plain.of_input(x), of_output),
        (plain.of_grad(g), of_input),
        (grads.mT, plain.of_input(x).mT),
    ][dim]
    y = torch.stack([product(a, b, operands, recipe) for a, b in zip(*operands, strict=True)])
    if dim == 2:  # (groups, outputs, taps * channels)
        return y.unflatten(2, (-1, w.shape[1])).transpose(2, 3).flatten(0, 1)
    return y.unflatten(1, (x.shape[0], -1)).permute(1, 0, 3, 2).flatten(1, 2)


def product(a: Tensor, b: Tensor, whole: tuple[Tensor, Tensor], recipe: Recipe) -> Tensor:
    """``a b^T`` of one group: the rows of a scale of all groups are theirs."""
    largest = [part.abs().max() for part in whole]
    rows = [F.pad(part, (0, 0, 0, 1)) for part in (a, b)]
    for part, largest_of_all in zip(rows, largest, strict=True):
        part[-1, 0] = largest_of_all
    return linear(*rows, recipe=recipe)[:-1, :-1]


def test_transposed_is_the_input_gradient_of_a_convolution():
    """Of the same operands, bit for bit; its own input gradient is the convolution."""
    for case in ("1d stride", "2d stride", "2d dilation", "2d depthwise"):
        shape, kernel, given = CASES[case]
        x, w = randn(*shape), randn(*kernel, seed=1)
        with fp8.autocast(HOPPER):
            y = conv(x, w, **given)
            g = randn(*y.shape, seed=2)
            reach = conv_transpose(g.detach(), w.detach(), **given).shape
            extra = [a - b for a, b in zip(shape[2:], reach[2:], strict=True)]
            z = conv_transpose(g, w, output_padding=extra, **given)
        dx, dw = torch.autograd.grad(y, (x, w), g.detach(), retain_graph=True)
        assert torch.equal(z, dx)
        dg, dw_of_transposed = torch.autograd.grad(z, (g, w), x.detach())
        assert torch.equal(dg, y)
        assert torch.equal(dw_of_transposed, dw)


def three(recipe: Recipe | str | None, dtype: torch.dtype = torch.float32, **given: Any) -> Any:
    shape, kernel, settings = CASES["2d stride"]
    x, w, b = (t.detach().to(dtype) for t in (randn(*shape), randn(*kernel, seed=1), randn(4)))
    leaves = [t.requires_grad_() for t in (x, w, b)]
    with fp8.autocast(recipe) if recipe else torch.enable_grad():
        y = conv(*leaves, **settings, **given)
    return outcome(lambda: y, leaves, randn(*y.shape, seed=2).detach().to(dtype))


@pytest.mark.parametrize("recipe", [HOPPER, CDNA3, FORMATS], ids=lambda recipe: recipe.name)
def test_only_the_sums_differ(recipe):
    """By less than 2**-13 of the largest product, 16, for each of 9 * 8 terms, and the rounding of
    scales that are not powers of two."""
    scales = (0.5, 0.25, 3.0)
    exact = three(dataclasses.replace(recipe, accumulate=None), scales=scales)
    found = three(recipe, scales=scales)
    for got, want in zip(found[:3], exact[:3], strict=True):
        assert recipe is CDNA3 or not torch.equal(got, want)
        assert (got - want).abs().max() <= 3 * 4 * 80 * 2.0**-13 * 16
        assert (got - want).norm() <= 2.0**-11 * want.norm()
    torch.testing.assert_close(found[3], exact[3])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype):
    for got, want in zip(three(HOPPER, dtype), three(None, dtype), strict=True):
        assert got.dtype == dtype
        assert (got - want).norm() < 0.1 * want.norm()


def test_torch_autocast():
    shape, kernel, given = CASES["2d"]
    x, w = randn(*shape), randn(*kernel, seed=1)
    with fp8.autocast(HOPPER):
        y = conv(x, w, **given)
        with torch.autocast("cpu", torch.bfloat16):
            z = conv(x, w, **given)
    assert torch.equal(z, y.bfloat16())


def test_compiled_is_eager():
    first = nn.Conv2d(8, 4, 3, stride=2, padding=1, bias=False)
    second = nn.ConvTranspose2d(4, 8, 3, groups=2, bias=False)
    model = fp8.convert(nn.Sequential(first, second), HOPPER)
    x, g = randn(2, 8, 7, 6), randn(2, 8, 6, 5, seed=1).detach()
    leaves, compiled = (x, *model.parameters()), torch.compile(model, backend="aot_eager")
    assert_same(*(outcome(lambda r=run: r(x), leaves, g) for run in (compiled, model)))


def test_histories_are_recorded():
    layers = [nn.Conv1d(8, 4, 3) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    on = dataclasses.replace(fp8.RECIPES["delayed"], accumulate="blackwell")
    results = []
    for layer, recipe in zip(layers, (fp8.RECIPES["delayed"], on), strict=True):
        fp8.convert(layer, recipe)
        for seed in range(2):
            y = layer(randn(2, 8, 9, seed=seed))
            layer.zero_grad()
            y.backward(randn(*y.shape, seed=seed).detach())
        results.append([y.detach(), layer.weight.grad, *layer.buffers()])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_empty_batches():
    x, w = randn(0, 8, 9), randn(4, 8, 3, seed=1)
    with fp8.autocast(HOPPER):
        y = conv(x, w)
    dx, dw = torch.autograd.grad(y.sum(), (x, w))
    assert (y.shape, dx.shape) == ((0, 4, 7), x.shape)
    assert torch.equal(dw, torch.zeros_like(w))


def test_refusals():
    x, w = randn(2, 8, 9), randn(4, 8, 3, seed=1)
    with fp8.autocast(HOPPER):
        with pytest.raises(RuntimeError):
            conv(x, randn(4, 6, 3))
        with pytest.raises(RuntimeError):
            conv(x, randn(4, 8, 12))
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(conv(x, w).sum(), x, create_graph=True)
    by_rows = dataclasses.replace(fp8.RECIPES["row"], accumulate="hopper")
    with (
        fp8.strict(),
        fp8.autocast(by_rows),
        pytest.raises(fp8.warnings.RecipeWarning, match="by rows or"),
    ):
        conv(x, w)
