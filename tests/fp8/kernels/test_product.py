"""Backend "native": the FP8 kernels compute what the simulation does, from one byte an element."""

import dataclasses

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import ScalingType
from torch.utils._python_dispatch import TorchDispatchMode

import fp8
from fp8 import FORMATS, RECIPES, Cast, Recipe
from fp8.casts import casting
from fp8.kernels import kernel, table
from fp8.kernels import product as native
from fp8.products.matmul import linear
from fp8.torch_internals.compiling_flag import marked_as_compiling
from fp8.torch_internals.inductor import run_compiled
from tests.fp8.blocks import block, keeper
from tests.fp8.kernels.scaled_mm import emulated, forget
from tests.fp8.oracles import all_patterns, assert_rounded, random_patterns
from tests.reference import unrotated
from tests.shared import (
    assert_same,
    normal,
    pairs,
    parametrize,
    randn,
    refuses,
    sampled,
    warns,
)

__all__ = ["emulated"]

CPU = torch.device("cpu")
KNOWN = [name for name, recipe in RECIPES.items() if not native.why_not_recipe(recipe)]
NATIVE = [name for name in KNOWN if native.needs(RECIPES[name])[0] == kernel.ALIGNMENT]
TILED = [name for name in KNOWN if name not in NATIVE]
STATELESS = [name for name in NATIVE if not RECIPES[name].keeps_history]
SHAPES = [(48, 32, 64), (1, 16, 32), (33, 128, 48)]  # rows, in, out
TILED_SHAPES = [(128, 128, 256), (33, 384, 128), (1, 128, 640)]
GRID = [(recipe, shape) for recipe in NATIVE for shape in SHAPES]
GRID += [(recipe, shape) for recipe in TILED for shape in TILED_SHAPES]
NO_GPU = "" if torch.cuda.is_available() else "no CUDA device"
NO_GPU = NO_GPU or kernel.why_not_device(torch.device("cuda"))

pytestmark = pytest.mark.native


def run(backend, recipe, tensors, scales=(1.0, 1.0, 1.0)):
    """The output and the gradients of input, weight and bias; with a history, in a third pass."""
    layer = keeper(recipe) if RECIPES[recipe].keeps_history else None
    torch.manual_seed(0)  # of gradients that are rounded stochastically
    for grow in (4.0, 2.0, 1.0) if layer else (1.0,):
        leaves = [(grow * t).detach().clone().requires_grad_() for t in tensors]
        with block(recipe, backend, layer):
            y = linear(*leaves, scales=scales)
        y.backward(randn(*y.shape, seed=9).to(y))
    return [y.detach(), *(leaf.grad for leaf in leaves)]


def of_all(cast):
    return Recipe(name="one", input=cast, weight=cast, grad=cast)


def tensors(rows, inner, outer, dtype=torch.float32):
    shapes = ((rows, inner), (outer, inner), (outer,))
    return tuple(randn(*shape, seed=i).to(dtype) for i, shape in enumerate(shapes))


def test_some_recipes_have_kernels_and_the_others_say_why_not():
    assert {"unit", "unit_e4m3", "tensor", "row"} <= set(NATIVE)
    assert {"block", "mxfp8", "nvfp4"} <= set(TILED)
    reasons = {name: native.why_not_recipe(recipe) for name, recipe in RECIPES.items()}
    assert "bf16 by bf16 with scales by tensor" in reasons["bf16"]
    assert "by rule 'e4m3_eden'" in native.why_not_recipe(
        unrotated(RECIPES["quartet2"])
    )
    turned = Cast(format="e4m3", hadamard=32, signs="random")
    assert "random signs" in native.why_not_recipe(of_all(turned))


def check(recipe, shape, size, scales, device):
    """Operands are the same to the bit, so products differ by the order of sums, and by what a sum
    keeps: all of float32, or on a GPU 14 bits (see `fp8.kernels.selftest`).

    Of n terms a sum has an error of at most n * 2**-24, or 2**-13, times the sum of magnitudes,
    which is at most the product of the norms of a row and a column; both have it. So of all sums,
    in the norm. A cast doubles a magnitude at most, in the steps next to zero.
    """
    x, w, b = (t.to(device) for t in tensors(*shape))
    given = (x * size, w, b)
    got, want = (
        run(backend, recipe, given, scales) for backend in ("native", "simulate")
    )
    rows, inner, outer = shape
    sums = (inner, outer, rows, rows)
    x, w, b, grad = (
        float(t.detach().norm()) for t in (*given, randn(rows, outer, seed=9))
    )
    norms = (x * w + b * rows**0.5, grad * w, grad * x, grad * rows**0.5)
    unit = 2.0 ** (-24 if device == "cpu" else -13)
    for g, w, n, norm in pairs(got, want, sums, norms):
        assert (g - w).norm() <= 2 * (n + 4) * unit * 4 * norm


def each_case(test):
    for names, values, ids in (
        ("size", [2.0**-10, 1.0, 2.0**6], ["small", "one", "large"]),
        ("scales", [(1.0, 1.0, 1.0), (0.25, 0.3, 0.125)], ["plain", "unit"]),
        (("recipe", "shape"), GRID, str),
    ):
        test = parametrize(names, values, ids=ids)(test)
    return test


@sampled(9)
@each_case
def test_native_is_the_simulation(recipe, shape, scales, size, request):
    """Kernels with scales of tiles are emulated from their documents: layouts, gradients and
    padding."""
    if recipe in TILED:
        request.getfixturevalue("emulated")
    check(recipe, shape, size, scales, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(bool(NO_GPU), reason=NO_GPU)
@each_case
def test_native_is_the_simulation_on_a_gpu(recipe, shape, scales, size):
    if why := native.why_not_here(
        RECIPES[recipe], torch.device("cuda", 0), torch.float32
    ):
        pytest.skip(why)
    check(recipe, shape, size, scales, "cuda:0")


@parametrize("recipe", STATELESS)
def test_operands_are_the_same_to_the_bit(recipe):
    x = randn(32, 48, seed=3) * torch.logspace(-12, 6, 32)[:, None]
    for spec in set(RECIPES[recipe].casts):
        for axis in (-1, -2):
            stored = table.store(x, spec, axis)
            got = stored.values.float() * stored.scale
            want = x if spec is None else casting.rounded(x, spec, axis)[0]
            assert_same(got if axis == -1 else got.mT, want)


def numbers(format):
    """All bfloat16 and float16 numbers, a million of float32, and those next to each tie."""
    yield from (all_patterns(dtype) for dtype in (torch.bfloat16, torch.float16))
    row = FORMATS[format]
    values = torch.arange(128, dtype=torch.uint8).view(row.dtype).double()
    values = values[values.isfinite()]
    ties = torch.cat(
        [(values[1:] + values[:-1]) / 2, row.max * (1 + torch.tensor([4, 8]) / 128)]
    )
    near = (
        ties.float().nextafter(torch.tensor(end)).double() for end in (0.0, torch.inf)
    )
    yield torch.cat([random_patterns(1 << 20, 0), *(t.float() for t in (ties, *near))])


@parametrize("compiled", [False, True])
@parametrize("format", ["e4m3", "e5m2"])
def test_a_conversion_rounds_as_the_simulation(format, compiled):
    """Bytes of every sign, also that of zero; NaN is NaN, and Inf, which e4m3 has not, is as in a
    simulated cast."""
    spec = Cast(format=format)
    for x in numbers(format):
        x = torch.cat([x, -x]).view(2, -1)
        want = casting.rounded(x.float(), spec)[0]

        def store(x):
            return [table.store(x, spec).values]

        (got,) = run_compiled(store, x) if compiled else store(x)
        assert_rounded(got.float(), want, x)


FP8, HOPPER = (
    "native on CUDA devices with FP8",
    "native on CUDA devices of compute capability 9.0",
)
LATER = "native on CUDA devices of compute capability 10.0 and up"


@parametrize(
    "recipe, sizes, why",
    [
        ("tensor", (32, 16), FP8),
        (
            "mxfp6",
            (32, 16),
            "simulated: no kernel multiplies e2m3 by e2m3 with scales by mx",
        ),
        ("row_gw_hp", (32, 16), FP8),
        ("block", (96, 128), "simulated: 96 is no multiple of 128"),
        ("block", (256, 128), HOPPER),
        ("mxfp8", (96, 128), LATER),
        ("mxfp8", (96, 48), "simulated: 48 is no multiple of 32"),
        ("nvfp4", (96, 128), LATER),
    ],
)
def test_the_report_predicts_what_each_device_does(recipe, sizes, why):
    """Multiples of 16 for all, of 128 for blocks and of 32 for MX; as the kernels want them."""
    layer = fp8.convert(nn.Linear(*sizes), recipe)
    assert fp8.report(layer)[0].why == f"{recipe}, {why}"
    assert fp8.report(fp8.convert(layer, recipe, backend="simulate"))[0].why == recipe


@parametrize(
    "kind, sizes",
    [
        (ScalingType.TensorWise, ((), ())),
        (ScalingType.RowWise, ((48, 1), (1, 32))),
    ],
)
def test_a_graph_of_torch_2_11_has_the_older_product(kind, sizes, monkeypatch):
    """For which the compiler generates a call. As a call on a device that is only thought of."""
    monkeypatch.setattr(kernel, "_IS_LOWERED", False)
    called = []

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            called.append(func)
            return func(*args, **(kwargs or {}))

    with FakeTensorMode(), torch.device("cuda"), marked_as_compiling(True):
        a, b = (torch.empty(n, 64, dtype=torch.float8_e4m3fn) for n in (48, 32))
        left, right = (kernel.Scales(torch.empty(size), kind) for size in sizes)
        with Calls():
            y = kernel.scaled_mm(
                a, b, left, right, kernel.Output(1.0, torch.bfloat16, True)
            )
    assert (y.shape, y.dtype) == ((48, 32), torch.bfloat16)
    assert torch.ops.aten._scaled_mm.default in called


def test_native_without_a_kernel_on_the_device_simulates_and_says_so():
    layer, x = fp8.convert(nn.Linear(96, 128), "mxfp8", backend="native"), normal(8, 96)
    why = "scales by mx need CUDA devices of compute capability 10.0 and up"
    assert fp8.report(layer)[0].why == f"mxfp8, simulated: {why}"
    forget()
    with warns(f"simulated on cpu: {why}", RuntimeWarning):
        y = layer(x)
    assert_same(layer(x), y)  # and warns once
    assert_same(fp8.convert(layer, "mxfp8")(x), y)


def test_bad_input():
    with refuses("unknown backend 'gpu'; choose one of 'simulate', "):
        fp8.autocast("unit", backend="gpu")
    with refuses(r"recipe 'mxfp6' has no kernels: .* e2m3 by e2m3"):
        fp8.autocast("mxfp6", backend="native")
    assert fp8.autocast("mxfp6", backend="auto").backend == "simulate"
    x, w, _ = tensors(16, 16, 16)
    with refuses("'native': no FP8 product is known for meta", RuntimeError):
        linear(x.to("meta"), w.to("meta"), recipe=RECIPES["unit"], backend="native")


@parametrize("fast", [("forward",), (), ("grad_input", "grad_weight")])
def test_products_are_summed_fast_as_the_recipe_says(fast, monkeypatch):
    asked = []
    real = nn.functional.scaled_mm

    def kernel(*args, use_fast_accum, **kwargs):
        asked.append(use_fast_accum)
        return real(*args, **kwargs)

    monkeypatch.setattr(nn.functional, "scaled_mm", kernel)
    recipe = dataclasses.replace(RECIPES["unit"], fast_sums=fast)
    x, w = (t.requires_grad_() for t in tensors(32, 16, 32)[:2])
    linear(x, w, recipe=recipe, backend="native").sum().backward()
    names = ("forward", "grad_input", "grad_weight")
    assert asked[-3:] == [name in fast for name in names]
    assert Recipe.from_dict(recipe.to_dict()) == recipe


@parametrize("fast", ["forward", ("input",)])
def test_other_products_are_refused(fast):
    with refuses("fast_sums", (TypeError, ValueError)):
        dataclasses.replace(RECIPES["unit"], fast_sums=fast)
