"""Products whose sums are those of a tensor core, forward and backward."""

import dataclasses

import torch
from torch import nn

import fp8
from fp8.casts.casting import quantized
from fp8.lab.sums.dot import dot
from fp8.products.matmul import linear, matmul
from fp8.recipes.tensor_cores import TENSOR_CORES
from tests.shared import assert_same, in_one_graph, linears, parametrize, refuses

ROWS, IN, OUT = 24, 96, 48


def on(name, chip, promote=0):
    return dataclasses.replace(fp8.RECIPES[name], accumulate=chip, promote=promote)


def operands(dtype=torch.float32):
    torch.manual_seed(0)
    x, w, g = (torch.randn(shape) for shape in ((ROWS, IN), (OUT, IN), (ROWS, OUT)))
    return x.to(dtype).requires_grad_(), w.to(dtype).requires_grad_(), g.to(dtype)


def three(recipe, dtype=torch.float32):
    """The output and both gradients of a linear layer."""
    x, w, g = operands(dtype)
    y = linear(x, w, recipe=recipe)
    y.backward(g)
    return [y.detach(), x.grad, w.grad]


def test_the_products_are_those_of_the_instruction():
    x, w, g = operands()
    recipe = on("tensor", "hopper")
    y, dx, dw = three(recipe)
    kinds = (recipe.input, recipe.weight, recipe.grad)

    def product(a, b, of_a, of_b):
        first, second = (
            quantized(a.detach(), kinds[of_a]),
            quantized(b.detach(), kinds[of_b]),
        )
        low = {"e4m3": -6, "e5m2": -14}
        lows = low[kinds[of_a].format], low[kinds[of_b].format]
        sums = dot(first.values, second.values, lows, TENSOR_CORES["hopper"])
        return sums * (first.scale * second.scale)

    assert_same(y, product(x, w, 0, 1))
    assert_same(dx, product(g, w.mT, 2, 1))
    assert_same(dw, product(g.mT, x.mT, 2, 0))


@parametrize("name, promote", [("unit", 32), ("mxfp8", 0)])
def test_promotion_and_scales_that_the_instruction_does_not_apply_end_a_sum(
    name, promote
):
    """After 32 products; each part is scaled and added with one rounding."""
    x, w, _ = operands()
    y = linear(x, w, recipe=on(name, "hopper", promote=promote))
    want = torch.zeros_like(y, dtype=torch.float64)
    for i in (0, 32, 64):
        part = linear(x[:, i : i + 32], w[:, i : i + 32], recipe=on(name, "hopper"))
        want = (want + part.double()).float().double()
    assert_same(y.double(), want)


@parametrize(
    "name, rows, width, backend",
    [("tensor", 24, 40, "inductor"), ("block", 384, 256, "aot_eager")],
)
def test_compiled_is_eager(name, rows, width, backend):
    """In blocks of (1, 128), a gradient is cast along both of its axes."""
    layer = fp8.convert(nn.Linear(width, width), on(name, "hopper"))
    compiled = in_one_graph(layer, backend)
    x, g = torch.randn(2, rows, width)
    x.requires_grad_()
    results = []
    for each in (layer, compiled):
        layer.zero_grad()
        x.grad = None
        y = each(x)
        y.backward(g)
        results.append((y.detach(), x.grad, layer.weight.grad))
    assert_same(*results)


def test_empty_products():
    recipe = on("block", "hopper")
    assert linear(torch.randn(0, IN), torch.randn(OUT, IN), recipe=recipe).shape == (
        0,
        OUT,
    )
    y = linear(torch.randn(4, 0), torch.randn(OUT, 0), recipe=recipe)
    assert_same(y, torch.zeros(4, OUT))


@parametrize(
    "call, message",
    [
        (
            lambda: on("nvfp4", "hopper"),
            r"'hopper' multiplies e4m3, e5m2, not e2m1 by e2m1",
        ),
        (lambda: on("tensor", "volta"), "accumulate"),
        (
            lambda: dataclasses.replace(fp8.RECIPES["tensor"], promote=128),
            "needs accumulate",
        ),
        (lambda: on("tensor", "hopper", promote=-1), "promote must be 0"),
        (
            lambda: fp8.convert(
                linears(IN, OUT),
                on("tensor", "hopper"),
                backend="native",
            ),
            "'hopper' are simulated",
        ),
    ],
)
def test_what_is_refused(call, message):
    with refuses(message):
        call()


def test_rules_keep_the_sums_of_a_recipe():
    policy = fp8.Policy(on("tensor", "hopper"), rules=[("*", "grad_weight", None)])
    layer = fp8.convert(linears(IN, OUT), policy)[0]
    assert layer.fp8_recipe.accumulate == "hopper"
    mixed = fp8.Policy(on("tensor", "hopper"), rules=[("*", "grad_weight", "row")])
    with refuses("different sums"):
        fp8.convert(linears(IN, OUT), mixed)


@parametrize("kind", ["attention", "convolution", "grouped"])
def test_products_without_these_sums_warn(kind):
    q = torch.randn(1, 2, 4, 16)
    m = torch.randn(4, 4)
    functions = {
        "attention": lambda: nn.functional.scaled_dot_product_attention(q, q, q),
        "convolution": lambda: nn.functional.conv1d(m, torch.randn(2, 4, 3)),
        "grouped": lambda: nn.functional.grouped_mm(q[0], q[0].mT),
    }
    raised = refuses(kind, fp8.warnings.RecipeWarning)  # each is shown once per process
    with fp8.strict(), fp8.autocast(on("tensor", "hopper")), raised:
        functions[kind]()


def test_batches_are_single_products():
    a, b = torch.randn(3, 8, 64), torch.randn(3, 64, 16)
    recipe = on("unit", "ada")
    batched = matmul(a, b, recipe=recipe)
    single = torch.stack([matmul(a[i], b[i], recipe=recipe) for i in range(3)])
    assert_same(batched, single)


def test_a_product_of_an_uncast_operand_is_torchs():
    """In the dtype of the operands, as without these sums."""
    cast = fp8.Cast(format="e4m3", scaling="tensor", rule="up")
    recipe = fp8.Recipe(name="half", weight=cast, grad=cast, accumulate="hopper")
    got = three(recipe, torch.bfloat16)
    want = three(dataclasses.replace(recipe, accumulate=None), torch.bfloat16)
    assert_same(got[0], want[0])
    assert_same(got[2], want[2])
