"""The time of a compiled step: kernels by their code and by their bytes, and launches."""

import pytest
import torch

import fp8
from fp8.kernels import selftest
from fp8.kernels.kernel import filled
from fp8.kernels.table import store
from fp8.lab.forecast import assembly
from fp8.lab.forecast.assembly import Code
from fp8.lab.forecast.card import CARDS, compiling_for, why_not
from fp8.lab.forecast.compiled import Graph, Kernel, graphs
from fp8.lab.forecast.result import Forecast, Variant
from fp8.lab.forecast.times import by_bytes, by_code, host_seconds, times
from fp8.lab.hardware import HARDWARE, Cores
from fp8.torch_internals.decorators import in_graph
from tests.shared import parametrize

DTYPE = torch.bfloat16
CORES = Cores(processors=1, clock=1.0, cache=1.0, latency=1.0, shortest=5.0)
CODE = Code(
    blocks=8,
    warps=64,
    instructions=1.0,
    trips=1.0,
    moved=1.0,
    cached=1.0,
    registers=16,
    shared=0,
)


@parametrize(
    "fields, seconds",
    [
        ({}, 8 * 64 / 4),
        ({"cached": 1000.0}, 1000),
        ({"trips": 50.0}, 50 * 8),  # a block of 2048 threads fills the processor
        ({"blocks": 1, "instructions": 0.0}, 5),
    ],
)
def test_a_kernel_takes_the_longest_of_its_times(fields, seconds):
    assert by_code(CODE._replace(**fields), CORES) == seconds


def test_products_with_a_narrow_operand_are_slower():
    h200 = HARDWARE["h200"]
    wide, narrow = (
        by_bytes(Kernel("fp8", "mm", 10**12, 0, 0, n), h200) for n in (1024, 768)
    )
    assert wide == pytest.approx(10**12 / (0.576 * h200.peak["fp8"]))
    assert narrow == pytest.approx(10**12 / (0.475 * h200.peak["fp8"]))


def test_the_host_launches_each_kernel():
    names = ("extern_kernels._scaled_mm", "torch.ops.aten._scaled_mm_v2.default")
    kernels = [
        Kernel("triton", "t", 0, 1, 1),
        *(Kernel("fp8", n, 1, 1, 1) for n in names),
    ]
    host = HARDWARE["h200"].host
    assert host_seconds([Graph(False, tuple(kernels), 0, "")], HARDWARE["h200"]) == (
        pytest.approx(host.graph + host.triton + 2 * host.library + host.python)
    )
    bound = Variant(recipe="unit", seconds=2.0, card=1.0, host=2.0)
    table = Forecast("h200", "compiler", (bound,)).table()
    assert bound.bound == "launches"
    assert "launches" in table


def test_kernels_without_tools_are_counted_by_their_bytes(monkeypatch):
    monkeypatch.setattr("fp8.lab.forecast.times.codes", lambda *_: {}["nvdisasm"])
    graph = Graph(False, (Kernel("triton", "t", 0, 10**9, 0),), 0, "")
    found = times([graph], HARDWARE["h200"])
    assert found.card == pytest.approx(1e9 / HARDWARE["h200"].stream)
    assert "nvdisasm" in found.uncounted


@in_graph
def both(x):
    """The cast of a gradient of "tensor" for its two products."""
    grad = fp8.RECIPES["tensor"].grad
    return [filled(store(x, grad, axis).values) for axis in (-1, -2)]


@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.filterwarnings("ignore::UserWarning")  # the compiler's
@parametrize("tokens", [4096, 65536])
def test_instructions_of_a_gradients_cast(tokens):
    """Both layouts, in the fastest configuration; a cast is bound by memory up to 28 (H200)."""
    most = 17 if torch.__version__ >= "2.14" else 30
    card, device = CARDS["h200"], HARDWARE["h200"]
    with compiling_for(card), selftest.trusted():
        (graph,) = graphs(
            lambda x: both(x), torch.empty(tokens, 32768, dtype=DTYPE, device="cuda")
        )
        kernel = max(graph.kernels, key=lambda kernel: kernel.written)
        source = assembly.sources(graph)[kernel.name]
        made = list(assembly.codes(kernel.name, source, card))
    least = by_bytes(kernel, device)
    _, each = min(
        (
            max(least, by_code(code, device.cores)),
            code.blocks * 32 * code.warps * code.instructions / (tokens * 32768),
        )
        for code in made
    )
    assert kernel.written == 2 * tokens * 32768
    assert each <= most
