"""Before a kernel is used it is shown to compute what simulation does; one that lies is not."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import fp8
from fp8 import RECIPES
from fp8.kernels import product as native
from fp8.kernels import selftest
from fp8.lab import doctor
from fp8.torch_internals import inductor
from tests.fp8.kernels.scaled_mm import emulated, forget, scaled_mm
from tests.fp8.products.test_matmul import randn

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


def why_not(recipe: str, dtype: torch.dtype = torch.float32) -> str:
    return native.why_not_here(RECIPES[recipe], CPU, dtype)


@pytest.mark.parametrize(
    ("recipe", "dtype"),
    [
        *(("row", dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
        *((recipe, torch.bfloat16) for recipe in ("unit", "tensor", *TILED)),
    ],
)
def test_the_kernels_of_the_cpu_and_emulated_ones_pass(recipe, dtype, request):
    if recipe in TILED:
        request.getfixturevalue("emulated")
    assert why_not(recipe, dtype) == ""


def refuses(*args, **kwargs) -> Tensor:
    raise NotImplementedError("only supported in CUDA for SM90\nand more")


def reversed_scales(a, b, left, how, right, *rest, **kwargs) -> Tensor:
    """The scales of the first operand, last to first."""
    left = left.flatten().flip(0).view(left.shape) if left.numel() > 1 else left * 2
    return REAL(a, b, left, how, right, *rest, **kwargs)


def one_element_off(*args, **kwargs) -> Tensor:
    result = REAL(*args, **kwargs)
    result[-1, -1] += 1
    return result


def in_bfloat16(*args, output_dtype, **kwargs) -> Tensor:
    return REAL(*args, output_dtype=torch.bfloat16, **kwargs)


OFF = "the kernel is off by"
LIES: dict[str, tuple[Callable[..., Tensor], str]] = {
    "refuses": (refuses, "the kernel raised NotImplementedError: only supported in CUDA for SM90"),
    "reversed scales": (reversed_scales, OFF),
    "2 % off": (lambda *args, **kwargs: REAL(*args, **kwargs) * 1.02, OFF),
    "one element off": (one_element_off, OFF),
    "NaN": (lambda *args, **kwargs: REAL(*args, **kwargs) * torch.nan, f"{OFF} inf times"),
    "dtype": (in_bfloat16, "the kernel gives torch.bfloat16, asked for torch.float32"),
}


@pytest.mark.parametrize("lie", LIES)
def test_what_a_lying_kernel_would_compute_is_simulated(lie, monkeypatch):
    """And the warning, the report and the doctor have its words."""
    recipe, (kernel, words) = "row", LIES[lie]
    layer, x = nn.Linear(48, 64), randn(16, 48).detach()
    want = fp8.convert(layer, recipe)(x)
    monkeypatch.setattr(F, "scaled_mm", kernel)
    fp8.convert(layer, recipe, backend="native")
    with pytest.warns(RuntimeWarning, match=f"simulated on cpu: output: {words}") as seen:
        got = [layer(x) for _ in range(2)]
    assert all(torch.equal(one, want) for one in got)
    assert len(seen) == 1
    (row,) = fp8.report(layer)
    assert row.why.startswith(f"{recipe}, simulated: output: {words}")
    assert "and more" not in row.why
    if lie == "refuses":
        rows = {row["recipe"]: row for row in doctor.examine()["recipes"] if row["device"] == "cpu"}
        assert rows[recipe]["runs"] == "simulated"
        assert words in rows[recipe]["why"]


def unswizzled(recipe: str, x: Tensor) -> Tensor:
    """The same scales as if the rows of a tile lay one after the other."""
    if recipe == "block":
        return x.flip(0).T.contiguous().T
    tiles = x.view(torch.uint8).view(-1, 32, 4, 4)
    return tiles.transpose(1, 2).flatten().view(x.dtype)


@pytest.mark.parametrize(
    ("recipe", "wrong"),
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
            step = 2.0 ** (terms.abs().amax(1, keepdim=True).clamp(min=1e-9).log2().floor() - 13)
            result[i] = ((terms / step).trunc() * step).sum(1)
        return (result * left.double() * right.double()).to(output_dtype)

    monkeypatch.setattr(F, "scaled_mm", kernel)
    assert why_not("tensor") == why_not("row") == ""


def test_only_the_gradient_may_be_wrong(monkeypatch):
    """A product of which one gradient cannot be computed is simulated as a whole."""

    def kernel(a, b, *rest, **kwargs):
        return (refuses if a.dtype == torch.float8_e5m2 else REAL)(a, b, *rest, **kwargs)

    monkeypatch.setattr(F, "scaled_mm", kernel)
    assert why_not("tensor").startswith("gradient of the input: the kernel raised")
    assert why_not("unit_e4m3") == ""


def test_a_kernel_is_tested_once(monkeypatch):
    calls = []
    monkeypatch.setattr(F, "scaled_mm", lambda *a, **k: calls.append(a) or REAL(*a, **k))
    layer = fp8.convert(nn.Linear(48, 64), "unit_e4m3", backend="native")
    with torch.no_grad():
        layer(torch.ones(16, 48))
        assert len(calls) == 6 + 1
        layer(torch.ones(16, 48))
        assert len(calls) == 6 + 2
        fp8.convert(nn.Linear(64, 48), "unit_e4m3", backend="native")(torch.ones(16, 64))
        assert len(calls) == 6 + 3


def test_modes_of_the_caller_do_not_affect_the_test():
    """Modes, random numbers, precision of products and threads of the caller."""
    torch.manual_seed(0)
    want = torch.rand(3)
    torch.manual_seed(0)
    modes = (torch.inference_mode(), FakeTensorMode(), fp8.autocast("nvfp4"))
    with torch.autocast("cpu", torch.bfloat16), modes[0], modes[1], modes[2]:
        assert why_not("row") == ""
    assert torch.equal(torch.rand(3), want)


@pytest.mark.native
def test_the_answer_is_known_to_a_compiler(monkeypatch):
    """Found while it compiles; compiled layers run on the kernel, or simulated, in one piece."""
    layer, x = fp8.convert(nn.Linear(48, 64), "row", backend="native"), randn(16, 48).detach()
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    y = compiled(x)
    assert selftest._kernels.cache_info().currsize == 1
    torch.testing.assert_close(y, layer(x))
    torch._dynamo.reset()
    forget()
    monkeypatch.setattr(F, "scaled_mm", refuses)
    with pytest.warns(RuntimeWarning, match="the kernel raised NotImplementedError"):
        z = torch.compile(layer, fullgraph=True, backend="eager")(x)
    z.sum().backward()
    torch.testing.assert_close(z, fp8.convert(layer, "row")(x))
    torch._dynamo.reset()


@pytest.mark.native
def test_compiled_casts_are_tested_while_a_graph_is_made(monkeypatch):
    """Once, and only for a graph with native products."""
    torch.compiler.reset()
    calls = []
    real = inductor.run_compiled
    monkeypatch.setattr(inductor, "run_compiled", lambda *a: calls.append(a) or real(*a))
    layer, x = fp8.convert(nn.Linear(48, 64), "unit", backend="native"), randn(16, 48).detach()
    want = layer(x)
    for other in (nn.Linear(48, 64), fp8.convert(nn.Linear(48, 64), "unit", backend="simulate")):
        torch.compile(other, fullgraph=True, backend="eager")(x)
    assert not calls
    for bias in (True, False):
        again = fp8.convert(nn.Linear(48, 64, bias=bias), "unit", backend="native")
        torch.compile(again, fullgraph=True, backend="eager")(x)
    assert len(calls) == 1
    assert torch.equal(torch.compile(layer, fullgraph=True, backend="eager")(x), want)


def raises(function, x: Tensor) -> list[Tensor]:
    raise RuntimeError("no compiler\nis here")


def corrupt(at: int, value: int) -> Callable[..., list[Tensor]]:
    """One byte of one result, as Triton stores it (triton-lang/triton issue 11111)."""

    def run(function, x: Tensor) -> list[Tensor]:
        stored = function(x)
        stored[at].view(torch.uint8)[-1, -1] = value
        return stored

    return run


def saturated(function, x: Tensor) -> list[Tensor]:
    """Inf as the largest finite value, as Triton converts it to e5m2."""
    return function(x.clamp(-57344, 57344))


FAULTS = {
    "a value": (corrupt(0, 0x55), "a cast to e4m3 has 1 wrong bytes of 262144"),
    "a transposed value": (corrupt(3, 0x7E), "the transpose of a cast to e5m2 has 1 wrong bytes"),
    "Inf": (saturated, "a cast to e4m3 has 8 wrong bytes"),
    "no compiler": (raises, "the compiler raised RuntimeError: no compiler"),
}


@pytest.mark.native
@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_compiled_wrongly_is_simulated_in_graphs_alone(fault, monkeypatch):
    torch.compiler.reset()
    run, why = FAULTS[fault]
    monkeypatch.setattr(inductor, "run_compiled", run)
    layer, x = fp8.convert(nn.Linear(48, 64), "row", backend="native"), randn(16, 48).detach()
    with pytest.warns(RuntimeWarning, match=f"of compiled code are simulated on cpu: {why}"):
        y = torch.compile(layer, fullgraph=True, backend="eager")(x)
    torch.testing.assert_close(y, fp8.convert(copy.deepcopy(layer), "row", backend="simulate")(x))
    calls = []
    monkeypatch.setattr(F, "scaled_mm", lambda *a, **k: calls.append(a) or REAL(*a, **k))
    torch.compile(layer, fullgraph=True, backend="eager")(x)
    assert not calls
    layer(x)
    assert len(calls) == 1


def test_auto_on_the_cpu_tests_nothing(monkeypatch):
    monkeypatch.setattr(F, "scaled_mm", refuses)
    layer = fp8.convert(nn.Linear(48, 64), "unit")
    layer(torch.ones(16, 48)).sum().backward()
    assert selftest._kernels.cache_info().currsize == 0


def test_every_configuration_of_every_kernel_runs(monkeypatch):
    """Those of two kernels, of which one has fewer; the tuning of other threads stays."""
    heuristics = pytest.importorskip("torch._inductor.runtime.triton_heuristics")
    kind, tuned = heuristics.CachingAutotuner, []
    monkeypatch.setattr(kind, "autotune_to_one_config", lambda tuner, *args: tuned.append(tuner))

    def tuner(*names: str):
        made = object.__new__(kind)
        made.launchers = list(names)
        return made

    kernels = tuner("a", "b", "c"), tuner("d", "e"), tuner("f")

    def run(x: Tensor) -> list[str]:
        for kernel in kernels:
            if len(kernel.launchers) > 1:
                kernel.autotune_to_one_config(x)
        thread = threading.Thread(target=tuner("g", "h").autotune_to_one_config, args=(x,))
        thread.start()
        thread.join()
        return [name for kernel in kernels for name in kernel.launchers]

    monkeypatch.setattr(inductor, "compiled", lambda function, x: run)
    results = list(inductor.in_each_configuration(run, torch.empty(4, device="meta")))
    assert results == [["a", "d", "f"], ["b", "e", "f"], ["c", "d", "f"]]
    assert [one.launchers for one in tuned] == [["g", "h"]] * len(results)
    kernels[0].launchers = ["a", "b"]
    kernels[0].autotune_to_one_config()
    assert tuned[-1] is kernels[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_each_configuration_of_a_gpu_is_compared():
    """The results are those of eager casts in all of them; a graph for each of four sizes."""
    x = randn(256, 1024).detach().bfloat16().cuda()
    runs = list(inductor.in_each_configuration(selftest._casts, x))
    assert len(runs) >= 4
    for stored in runs:
        assert not selftest._difference(stored, x)
    assert not selftest.why_not_compiled("cuda:0")
