"""In the passes between two looks, a few elements of each operand are checked: what is out of the
range of its scale is named, and the next pass looks."""

import copy

import pytest
import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func
from torch._guards import TracingContext
from torch._subclasses import FakeTensorMode
from torch.distributed.fsdp import fully_shard

import fp8
from fp8.casts.counts import MARGIN, SPOTS, passes, range_of_spots, spots
from fp8.casts.watch import LONGEST, watch_of
from fp8.formats.format import get_format
from fp8.recipes.history import Schedule
from fp8.warnings import PitfallWarning
from tests.launch import needs_gloo, run_ranks
from tests.shared import (
    descend,
    linears,
    normal,
    one_in,
    parametrize,
    quietly,
    said,
    settle,
)

WIDTH = 64


def model():
    """Converted, its scales set, between two looks."""
    torch.manual_seed(0)
    net = fp8.convert(linears(WIDTH, WIDTH, WIDTH), "static")
    train(net, 2)
    settle(net)
    return net


def train(net, steps, factor=1.0, optimizer=None, run=None):
    """The losses."""
    optimizer = optimizer or torch.optim.SGD(net.parameters(), 1e-3)
    x, run = factor * normal(64, WIDTH, seed=1), run or net
    return descend(optimizer, (run(x).square().mean() for _ in range(steps)))


def names(seen, text="of the input of '0'"):
    """Whether a warning has this text."""
    return any(text in each for each in seen)


@parametrize("shape", [(), (5,), (64, 64), (4096, 33), (8, 300, 70), (2, 3, 40, 50)])
def test_spots_are_a_grid_and_a_view(shape):
    x = normal(*shape)
    few = spots(x)
    assert few.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert few.numel() <= 2 ** len(shape) * 2 * SPOTS
    assert few.numel() >= min(x.numel(), SPOTS // 8)
    assert torch.isin(few, x).all()
    if x.ndim > 1:
        assert torch.equal(spots(x.mT), few.mT)
    compiled = torch.compile(spots, backend="eager", dynamic=True, fullgraph=True)
    assert torch.equal(compiled(x), few)


@parametrize("name", ["e4m3", "e5m2", "e2m1"])
def test_range_of_spots(name):
    format, scale = get_format(name), torch.tensor(8.0)
    inside = [0.0, format.min_normal, 1.0, MARGIN * format.max]
    outside = [format.min_normal / 2, 3 * format.max, float("inf"), float("nan")]
    for largest in inside + outside:
        x = torch.full((40, 70), 8 * largest).mT
        assert passes(x, scale, range_of_spots(format)) == (largest in inside)


@parametrize("factor", [2.0**20, 2.0**-20, float("nan")])
@parametrize("compiled", [False, one_in(3, True)])
def test_next_pass_looks(compiled, factor):
    """Eager code names the loss in the pass itself, a graph in the next one."""
    net = model()
    run = torch.compile(net, backend="aot_eager") if compiled else net
    if compiled:
        train(net, 1, run=run)
        settle(net, checks=True)
    watch = watch_of(net)
    with said(PitfallWarning) as first:
        train(net, 1, factor, run=run)
    assert watch.looks
    assert compiled or names(first)
    with said(PitfallWarning) as second:
        train(net, 1, factor, run=run)
    assert names(first + second)
    assert not watch.looks
    if factor == factor:  # the scale has followed
        scale = net[0].fp8_scale_input
        assert 0.5 <= scale.item() / factor <= 2


def test_healthy_passes_do_not_look():
    net, watch = model(), None
    watch = watch_of(net)
    for _ in range(3):
        train(net, 1)
        assert not watch.looks


def test_pauses_between_looks_double():
    """An operand may be out of range under each scale."""
    net, looks = model(), []
    watch = watch_of(net)
    with quietly():
        for step in range(40):
            train(net, 1, 2.0 ** (40 if step % 2 else -40))
            looks.append(watch.looks)
    assert 4 <= sum(looks) <= 8
    assert LONGEST == 128


def test_frozen_scales_are_named_and_stay():
    net = model()
    watch_of(net).frozen = True
    before = net[0].fp8_scale_input.clone()
    with said(PitfallWarning) as seen:
        train(net, 1, 2.0**20)
    assert names(seen, "Its scales are frozen")
    assert not watch_of(net).looks
    assert net[0].fp8_scale_input == before


def test_copies_check_their_own():
    net = copy.deepcopy(model())
    assert net[0].fp8_watch.layer() is net[0]
    settle(net)
    with said(PitfallWarning) as seen:
        train(net, 1, 2.0**20)
    assert names(seen)


@pytest.mark.filterwarnings("ignore:.torch.jit.* is deprecated")
def test_cuda_graphs_may_run_passes_without_a_look():
    """A graph under CUDA graphs writes into tensors at one address alone."""
    from torch._inductor.compile_fx import compile_fx

    found = []

    def backend(graph, inputs):
        def inner(graph, inputs, **_):
            metadata = TracingContext.get().fw_metadata
            written = [i for i, x in enumerate(metadata.input_info) if x.mutates_data]
            found.append((written, metadata.static_input_indices))
            return make_boxed_func(graph)

        return compile_fx(graph, inputs, inner_compile=inner)

    net = model()
    settle(net, checks=True)
    torch.compile(net, backend=backend)(normal(64, WIDTH)).sum().backward()
    assert found
    for written, static in found:
        assert written
        assert set(written) <= set(static)


def sharded(rank, store):
    """Each process has data of its own size; scales are the largest ones."""
    torch.manual_seed(0)
    net = fp8.convert(linears(WIDTH, WIDTH, WIDTH), "static")
    fully_shard(net)
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    with quietly():
        train(net, 1, (1.0, 2.0**8)[rank], optimizer)
    scales = torch.stack([net[0].fp8_scale_input, net[1].fp8_scale_grad])
    largest = scales.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    assert torch.equal(scales, largest)
    assert scales[0] == 2.0**8
    # A step of another model asks for no agreement, for which one process alone would wait.
    del optimizer
    watch_of(net).resume(Schedule(512 + rank))
    train(linears(WIDTH, WIDTH), 1)


@needs_gloo
def test_processes_agree(tmp_path):
    run_ranks(sharded, 2, tmp_path / "store")


def test_a_compiled_optimizer_is_one_graph():
    """Counting its steps is no part of it."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    net = fp8.convert(linears(WIDTH, WIDTH), "static")
    optimizer = torch.optim.SGD(net.parameters(), torch.tensor(1e-3))
    step = torch.compile(optimizer.step, backend=backend)
    for _ in range(4):
        net(normal(64, WIDTH)).sum().backward()
        step()
    assert len(graphs) == 1
    assert watch_of(net).step == 5


@parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_compiled_evaluation_does_not_look(mode):
    """In passes of training that look, too: it has one graph, which writes no statistics."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    net = model()
    run = torch.compile(net, backend=backend)
    watch = watch_of(net)
    for looks in (True, False):
        settle(net, checks=not looks)
        watch.looks = looks
        with mode():
            run(normal(64, WIDTH))
        assert not watch.is_open
    assert len(graphs) == 1
    watch.looks = True
    run(normal(64, WIDTH))
    assert len(graphs) == 2
    assert watch.is_open


def test_fake_tensors_of_another_model_are_not_read():
    """An optimizer of parameters of no converted model steps all, as that of an adapter does."""
    fake = fp8.convert(linears(WIDTH, WIDTH), "tensor")
    with FakeTensorMode():
        fake[0].fp8_watch.add("", torch.device("cpu"))
    plain = torch.nn.Linear(WIDTH, WIDTH)
    descend(torch.optim.SGD(plain.parameters()), [plain(normal(64, WIDTH)).sum()])
