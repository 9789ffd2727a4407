"""Products whose sums are those of a tensor core, forward and backward."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from torch import Tensor, nn

import fp8
from fp8.casts.casting import lowered, quantized
from fp8.lab.sums.dot import dot
from fp8.products import matmul
from fp8.products.matmul import linear
from fp8.recipes.cast import Cast
from fp8.recipes.recipe import Recipe
from fp8.recipes.tensor_cores import TENSOR_CORES

ROWS, IN, OUT = 24, 96, 48


def on(name: str, chip: str, promote: int = 0) -> Recipe:
    return dataclasses.replace(fp8.RECIPES[name], accumulate=chip, promote=promote)


def operands(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x, w, g = (torch.randn(shape) for shape in ((ROWS, IN), (OUT, IN), (ROWS, OUT)))
    return x.to(dtype).requires_grad_(), w.to(dtype).requires_grad_(), g.to(dtype)


def three(recipe: Recipe | None, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """The output and both gradients of a linear layer."""
    x, w, g = operands(dtype)
    y = linear(x, w, recipe=recipe)
    y.backward(g)
    return [y.detach(), x.grad, w.grad]


SUMMED = [
    ("tensor", "hopper"),
    ("row", "ada"),
    ("block", "hopper"),
    ("mxfp8", "hopper"),
    ("row_gw_hp", "hopper"),
    ("turned", "hopper"),
]
ROTATED = Cast(format="e4m3", scaling="tensor", hadamard=32)
TURNED = Recipe(name="turned", input=ROTATED, weight=ROTATED, grad=ROTATED)


@pytest.mark.parametrize(("name", "chip"), SUMMED)
def test_only_the_sums_differ(name, chip):
    """A step moves a sum of positive and negative terms of its size by less than 2**-13 of the
    largest term, for each of its steps and terms."""
    recipe = TURNED if name == "turned" else fp8.RECIPES[name]
    exact, found = three(recipe), three(dataclasses.replace(recipe, accumulate=chip))
    for got, want, terms in zip(found, exact, (IN, OUT, ROWS), strict=True):
        bound = 4 * (terms + terms // 16 + 1) * 2.0**-13 * 16  # products up to 4 * 4
        assert (got - want).abs().max() <= bound + 2e-6 * want.abs().max()
    if name != "row_gw_hp":
        assert all(not torch.equal(a, b) for a, b in zip(found, exact, strict=True))


def test_the_products_are_those_of_the_instruction():
    x, w, g = operands()
    recipe = on("tensor", "hopper")
    y, dx, dw = three(recipe)
    kinds = [lowered(cast) for cast in (recipe.input, recipe.weight, recipe.grad)]

    def product(a: Tensor, b: Tensor, of_a: int, of_b: int) -> Tensor:
        first, second = quantized(a.detach(), kinds[of_a]), quantized(b.detach(), kinds[of_b])
        low = {"e4m3": -6, "e5m2": -14}
        lows = low[kinds[of_a].format], low[kinds[of_b].format]
        sums = dot(first.values, second.values, lows, TENSOR_CORES["hopper"])
        return sums * (first.scale * second.scale)

    assert torch.equal(y, product(x, w, 0, 1))
    assert torch.equal(dx, product(g, w.mT, 2, 1))
    assert torch.equal(dw, product(g.mT, x.mT, 2, 0))


@pytest.mark.parametrize(("name", "promote"), [("unit", 32), ("mxfp8", 0)])
def test_promotion_and_scales_that_the_instruction_does_not_apply_end_a_sum(name, promote):
    """After 32 products; each part is scaled and added with one rounding."""
    x, w, _ = operands()
    y = linear(x, w, recipe=on(name, "hopper", promote=promote))
    want = torch.zeros_like(y, dtype=torch.float64)
    for i in (0, 32, 64):
        part = linear(x[:, i : i + 32], w[:, i : i + 32], recipe=on(name, "hopper"))
        want = (want + part.double()).float().double()
    assert torch.equal(y.double(), want)


def test_batches_are_single_products():
    torch.manual_seed(0)
    a, b = torch.randn(3, 8, 64), torch.randn(3, 64, 16)
    recipe = on("unit", "ada")
    batched = matmul.matmul(a, b, recipe=recipe)
    single = torch.stack([matmul.matmul(a[i], b[i], recipe=recipe) for i in range(3)])
    assert torch.equal(batched, single)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtypes(dtype):
    for got, want in zip(three(on("tensor", "hopper"), dtype), three(None, dtype), strict=True):
        assert got.dtype == dtype
        assert (got - want).norm() < 0.1 * want.norm()


def test_a_bias():
    """Under torch's autocast; its gradient is scaled."""
    with torch.autocast("cpu", torch.bfloat16), fp8.autocast(on("tensor", "hopper")):
        assert nn.Linear(IN, OUT)(torch.randn(4, IN)).dtype == torch.bfloat16
    x, w, g = operands()
    gradients = []
    for recipe in (on("tensor", "hopper"), None):
        bias = torch.zeros(OUT, requires_grad=True)
        linear(x, w, bias, scales=(1, 1, 0.5), recipe=recipe).backward(g)
        gradients.append(bias.grad)
    assert torch.equal(*gradients)


def test_a_product_of_an_uncast_operand_is_torchs():
    """In the dtype of the operands, as without these sums."""
    cast = Cast(format="e4m3", scaling="tensor", rule="up")
    recipe = Recipe(name="half", weight=cast, grad=cast, accumulate="hopper")
    got = three(recipe, torch.bfloat16)
    want = three(dataclasses.replace(recipe, accumulate=None), torch.bfloat16)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[2], want[2])


@pytest.mark.parametrize("name", ["delayed", "static"])
def test_histories_are_recorded(name):
    torch.manual_seed(0)
    layers = [nn.Linear(IN, OUT) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    x, g = torch.randn(2, 8, IN), torch.randn(2, 8, OUT)
    results = []
    for layer, recipe in zip(layers, (fp8.RECIPES[name], on(name, "ada")), strict=True):
        fp8.convert(layer, recipe)
        for batch, grad in zip(x, g, strict=True):
            layer.zero_grad()
            y = layer(batch)
            y.backward(grad)
        results.append([*layer.buffers()])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize(
    ("name", "rows", "width", "backend"),
    [("tensor", 24, 40, "inductor"), ("block", 384, 256, "aot_eager")],
)
def test_compiled_is_eager(name, rows, width, backend):
    """In blocks of (1, 128), a gradient is cast along both of its axes."""
    layer = fp8.convert(nn.Linear(width, width), on(name, "hopper"))
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    x, g = torch.randn(2, rows, width)
    x.requires_grad_()
    results = []
    for each in (layer, compiled):
        layer.zero_grad()
        x.grad = None
        y = each(x)
        y.backward(g)
        results.append((y.detach(), x.grad, layer.weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_empty_products():
    recipe = on("block", "hopper")
    assert linear(torch.randn(0, IN), torch.randn(OUT, IN), recipe=recipe).shape == (0, OUT)
    y = linear(torch.randn(4, 0), torch.randn(OUT, 0), recipe=recipe)
    assert torch.equal(y, torch.zeros(4, OUT))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: on("nvfp4", "hopper"), r"'hopper' multiplies e4m3, e5m2, not e2m1 by e2m1"),
        (lambda: on("tensor", "volta"), "accumulate"),
        (lambda: dataclasses.replace(fp8.RECIPES["tensor"], promote=128), "needs accumulate"),
        (lambda: on("tensor", "hopper", promote=-1), "promote must be 0"),
        (
            lambda: fp8.convert(
                nn.Sequential(nn.Linear(IN, OUT)), on("tensor", "hopper"), backend="native"
            ),
            "'hopper' are simulated",
        ),
    ],
)
def test_what_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_json_and_policies():
    recipe = on("block", "hopper", promote=128)
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe
    policy = fp8.Policy(recipe, last=1)
    assert fp8.Policy.from_json(policy.to_json()) == policy


def test_a_second_derivative_is_refused():
    x, w, _ = operands()
    y = linear(x, w, recipe=on("tensor", "hopper"))
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_stats_count_their_casts():
    layer, seen = nn.Linear(IN, OUT), {}
    for recipe in (on("tensor", "hopper"), fp8.RECIPES["tensor"]):
        with fp8.stats(layer) as counted, fp8.autocast(recipe):
            layer(operands()[0])
        seen[recipe.accumulate] = counted.rows()
    assert seen["hopper"] == seen[None]
    assert len(seen["hopper"]) == 2


def test_rules_keep_the_sums_of_a_recipe():
    policy = fp8.Policy(on("tensor", "hopper"), rules=[("*", "grad_weight", None)])
    layer = fp8.convert(nn.Sequential(nn.Linear(IN, OUT)), policy)[0]
    assert layer.fp8_recipe.accumulate == "hopper"
    mixed = fp8.Policy(on("tensor", "hopper"), rules=[("*", "grad_weight", "row")])
    with pytest.raises(ValueError, match="different sums"):
        fp8.convert(nn.Sequential(nn.Linear(IN, OUT)), mixed)


@pytest.mark.parametrize("kind", ["attention", "convolution", "grouped"])
def test_products_without_these_sums_warn(kind):
    q = torch.randn(1, 2, 4, 16)
    m = torch.randn(4, 4)
    functions = {
        "attention": lambda: nn.functional.scaled_dot_product_attention(q, q, q),
        "convolution": lambda: nn.functional.conv1d(m, torch.randn(2, 4, 3)),
        "grouped": lambda: nn.functional.grouped_mm(q[0], q[0].mT),
    }
    raised = pytest.raises(fp8.warnings.RecipeWarning, match=kind)  # each is shown once per process
    with fp8.strict(), fp8.autocast(on("tensor", "hopper")), raised:
        functions[kind]()
