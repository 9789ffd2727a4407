"""Compiled steps on a GPU that is not there: few launches, and CUDA graphs under every recipe."""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import compile_fx

import fp8
from fp8.kernels import selftest
from fp8.kernels.product import why_not_here
from fp8.lab.forecast.card import CARDS, compiling_for, why_not
from fp8.lab.forecast.compiled import graphs
from tests.shared import parametrize

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
    pytest.mark.filterwarnings("ignore"),  # the compiler's
]

#: Of torch.compile(mode="reduce-overhead"); a part that no CUDA graph holds is not split off.
OPTIONS = {"triton.cudagraphs": True, "graph_partition": False}


def step(recipe, kind="", options=None, rows=512, norm=nn.Identity):
    """The graphs of a step of two layers with set scales, after a norm."""
    with compiling_for(CARDS["h100"]), selftest.trusted(), torch.device("cuda"):
        if why := why_not_here(recipe, torch.device("cuda", 0), torch.bfloat16):
            pytest.skip(why)
        layers = (nn.Linear(*n, dtype=torch.bfloat16) for n in ((256, 512), (512, 256)))
        first = norm(256, dtype=torch.bfloat16)
        model = nn.Sequential(first, next(layers), nn.GELU(), *layers)
        model = fp8.convert(model, recipe)
        for layer in (model[1], model[3]):
            watch = layer.fp8_watch.watch
            watch.looks, watch.checks = kind == "looks", kind == "checks"
            if recipe.keeps_history:
                states = dict.fromkeys(layer._buffers, True)
                vars(layer.fp8_measured).update(states)
        x = torch.empty(rows, 256, dtype=torch.bfloat16, requires_grad=True)
        return graphs(model, x, options=options)


@parametrize(
    "name, kind",
    [
        *dict.fromkeys(fp8.RECIPES, "").items(),
        ("row", "looks"),
        ("static", "looks"),
        ("static", "checks"),
    ],
)
def test_cuda_graphs_hold_both_passes(name, kind, monkeypatch):
    """No operation of a CPU, no synchronization, and what is written keeps its address."""
    recipe, made = fp8.RECIPES[name], []

    def cudagraphify(call, static_input_idxs=(), **graph):
        assert {*graph["mutated_input_idxs"]} <= {*static_input_idxs}
        made.append(graph["is_backward"])
        return call

    monkeypatch.setattr(compile_fx, "cudagraphify", cudagraphify)
    counters.clear()
    sources = [graph.source for graph in step(recipe, kind, OPTIONS)]
    assert made == [False, True]
    assert not counters["inductor"]["cudagraph_skips"]
    if {cast.scaling for cast in recipe.casts if cast} <= {"unit", "tensor", "row"}:
        assert not any("_scaled_mm_v2.default(" in source for source in sources)


def test_static_scales_launch_no_kernel():
    unit, static = (
        sum(len(graph.kernels) for graph in step(fp8.RECIPES[name]))
        for name in ("unit", "static")
    )
    assert static <= unit


def test_a_history_costs_one_kernel_and_no_memory():
    """Beside the scale of the magnitudes now: casts are computed again, and the kernels that store
    them read no magnitudes."""
    made = {}
    for name in ("tensor", "delayed"):
        made[name] = step(fp8.RECIPES[name], rows=4096, norm=nn.RMSNorm)
    kernels, saved = (
        {name: sum(map(of, graphs)) for name, graphs in made.items()}
        for of in (lambda graph: len(graph.kernels), lambda graph: graph.saved)
    )
    assert kernels["delayed"] <= kernels["tensor"] + 6  # operands
    assert saved["delayed"] <= saved["tensor"] + 100
