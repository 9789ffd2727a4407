"""Before a kernel is used it is shown to compute what simulation does; one that lies is not."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fp8
from fp8 import RECIPES
from fp8.kernels import product as native
from fp8.kernels import selftest
from fp8.lab import doctor
from fp8.torch_internals import inductor
from tests.fp8.kernels.scaled_mm import emulated, forget, scaled_mm
from tests.shared import (
    assert_close,
    assert_same,
    in_one_graph,
    normal,
    parametrize,
    warns,
)

__all__ = ["emulated"]

CPU = torch.device("cpu")
REAL = F.scaled_mm
TILED = ["block", "mxfp8", "nvfp4"]

pytestmark = pytest.mark.native


@pytest.fixture(autouse=True)
def _nothing_tested():
    forget()
    yield
    forget()


def why_not(recipe, dtype=torch.float32):
    return native.why_not_here(RECIPES[recipe], CPU, dtype)


@parametrize(
    "recipe, dtype",
    [
        *(("row", dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
        *((recipe, torch.bfloat16) for recipe in ("unit", "tensor", *TILED)),
    ],
)
def test_the_kernels_of_the_cpu_and_emulated_ones_pass(recipe, dtype, request):
    if recipe in TILED:
        request.getfixturevalue("emulated")
    assert why_not(recipe, dtype) == ""


def refuses(*args, **kwargs):
    raise NotImplementedError("only supported in CUDA for SM90\nand more")


def reversed_scales(a, b, left, how, right, *rest, **kwargs):
    """The scales of the first operand, last to first."""
    left = left.flatten().flip(0).view(left.shape) if left.numel() > 1 else left * 2
    return REAL(a, b, left, how, right, *rest, **kwargs)


def one_element_off(*args, **kwargs):
    result = REAL(*args, **kwargs)
    result[-1, -1] += 1
    return result


def in_bfloat16(*args, output_dtype, **kwargs):
    return REAL(*args, output_dtype=torch.bfloat16, **kwargs)


OFF = "the kernel is off by"
LIES = {
    "refuses": (
        refuses,
        "the kernel raised NotImplementedError: only supported in CUDA for SM90",
    ),
    "reversed scales": (reversed_scales, OFF),
    "2 % off": (lambda *args, **kwargs: REAL(*args, **kwargs) * 1.02, OFF),
    "one element off": (one_element_off, OFF),
    "NaN": (
        lambda *args, **kwargs: REAL(*args, **kwargs) * torch.nan,
        f"{OFF} inf times",
    ),
    "dtype": (in_bfloat16, "the kernel gives torch.bfloat16, asked for torch.float32"),
}


@parametrize("lie", LIES)
def test_what_a_lying_kernel_would_compute_is_simulated(lie, monkeypatch):
    """And the warning, the report and the doctor have its words."""
    recipe, (kernel, words) = "row", LIES[lie]
    layer, x = nn.Linear(48, 64), normal(16, 48)
    want = fp8.convert(layer, recipe)(x)
    monkeypatch.setattr(F, "scaled_mm", kernel)
    fp8.convert(layer, recipe, backend="native")
    with warns(f"simulated on cpu: output: {words}", RuntimeWarning) as seen:
        got = [layer(x) for _ in range(2)]
    assert_same(got, [want, want])
    assert len(seen) == 1
    (row,) = fp8.report(layer)
    assert row.why.startswith(f"{recipe}, simulated: output: {words}")
    assert "and more" not in row.why
    if lie == "refuses":
        rows = {
            row["recipe"]: row
            for row in doctor.examine()["recipes"]
            if row["device"] == "cpu"
        }
        assert rows[recipe]["runs"] == "simulated"
        assert words in rows[recipe]["why"]


def unswizzled(recipe, x):
    """The same scales as if the rows of a tile lay one after the other."""
    if recipe == "block":
        return x.flip(0).T.contiguous().T
    tiles = x.view(torch.uint8).view(-1, 32, 4, 4)
    return tiles.transpose(1, 2).flatten().view(x.dtype)


@parametrize(
    "recipe, wrong",
    [("block", "first"), ("mxfp8", "second"), ("nvfp4", "first"), ("nvfp4", "pairs")],
)
def test_a_wrong_layout_is_noticed(recipe, wrong, emulated, monkeypatch):
    """Of the scales of an operand, or of the two numbers in a byte."""

    def kernel(a, b, left, how, right, *rest, **kwargs):
        scales = {"first": left, "second": right}
        if wrong == "pairs":
            codes = a.view(torch.uint8)
            a = (codes >> 4 | codes << 4).view(a.dtype)
        else:
            scale, *unit = scales[wrong] if recipe == "nvfp4" else [scales[wrong]]
            scale = unswizzled(recipe, scale)
            scales[wrong] = [scale, *unit] if recipe == "nvfp4" else scale
        return scaled_mm(a, b, scales["first"], how, scales["second"], *rest, **kwargs)

    monkeypatch.setattr(F, "scaled_mm", kernel)
    assert "output: the kernel is off by" in why_not(recipe)


def test_a_sum_of_14_bits_is_no_lie(emulated, monkeypatch):
    """What Hopper does: each term is cut off 13 bits below the largest of its sum."""

    def kernel(a, b, left, how, right, how_b, *rest, output_dtype, use_fast_accum):
        x, y = a.double(), b.T.double()
        result = torch.zeros(len(x), len(y), dtype=torch.float64)
        for i, row in enumerate(x):
            terms = row * y
            step = 2.0 ** (
                terms.abs().amax(1, keepdim=True).clamp(min=1e-9).log2().floor() - 13
            )
            result[i] = ((terms / step).trunc() * step).sum(1)
        return (result * left.double() * right.double()).to(output_dtype)

    monkeypatch.setattr(F, "scaled_mm", kernel)
    assert why_not("tensor") == why_not("row") == ""


def raises(function, x):
    raise RuntimeError("no compiler\nis here")


def corrupt(at, value):
    """One byte of one result, as Triton stores it (triton-lang/triton issue 11111)."""

    def run(function, x):
        stored = function(x)
        stored[at].view(torch.uint8)[-1, -1] = value
        return stored

    return run


def saturated(function, x):
    """Inf as the largest finite value, as Triton converts it to e5m2."""
    return function(x.clamp(-57344, 57344))


FAULTS = {
    "a value": (corrupt(0, 0x55), "a cast to e4m3 has 1 wrong bytes of 262144"),
    "a transposed value": (
        corrupt(3, 0x7E),
        "the transpose of a cast to e5m2 has 1 wrong bytes",
    ),
    "Inf": (saturated, "a cast to e4m3 has 8 wrong bytes"),
    "no compiler": (raises, "the compiler raised RuntimeError: no compiler"),
}


@pytest.mark.native
@parametrize("fault", FAULTS)
def test_what_is_compiled_wrongly_is_simulated_in_graphs_alone(fault, monkeypatch):
    run, why = FAULTS[fault]
    monkeypatch.setattr(inductor, "run_compiled", run)
    layer, x = fp8.convert(nn.Linear(48, 64), "row", backend="native"), normal(16, 48)
    with warns(f"of compiled code are simulated on cpu: {why}", RuntimeWarning):
        y = in_one_graph(layer, "eager")(x)
    assert_close(y, fp8.convert(copy.deepcopy(layer), "row", backend="simulate")(x))
    calls = []
    monkeypatch.setattr(
        F, "scaled_mm", lambda *a, **k: calls.append(a) or REAL(*a, **k)
    )
    in_one_graph(layer, "eager")(x)
    assert not calls
    layer(x)
    assert len(calls) == 1


def test_auto_on_the_cpu_tests_nothing(monkeypatch):
    monkeypatch.setattr(F, "scaled_mm", refuses)
    layer = fp8.convert(nn.Linear(48, 64), "unit")
    layer(torch.ones(16, 48)).sum().backward()
    assert selftest._kernels.cache_info().currsize == 0


def test_every_configuration_of_every_kernel_runs(monkeypatch):
    """Those of two kernels, of which one has fewer."""
    kind = pytest.importorskip(
        "torch._inductor.runtime.triton_heuristics"
    ).CachingAutotuner
    first, second = object.__new__(kind), object.__new__(kind)
    first.launchers, second.launchers = ["a", "b", "c"], ["d", "e"]

    def run(x):
        for kernel in (first, second):
            if len(kernel.launchers) > 1:
                kernel.autotune_to_one_config(x)
        return [*first.launchers, *second.launchers]

    monkeypatch.setattr(inductor, "compiled", lambda function, x: run)
    results = inductor.in_each_configuration(run, torch.empty(4, device="meta"))
    assert list(results) == [["a", "d"], ["b", "e"], ["c", "d"]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_each_configuration_of_a_gpu_is_compared():
    """The results are those of eager casts in all of them; a graph for each of four sizes."""
    x = normal(256, 1024).bfloat16().cuda()
    runs = list(inductor.in_each_configuration(selftest._casts, x))
    assert len(runs) >= 4
    for stored in runs:
        assert not selftest._difference(stored, x)
    assert not selftest.why_not_compiled("cuda:0")
