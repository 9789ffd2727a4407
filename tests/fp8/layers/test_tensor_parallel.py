"""torch's parallelize_module on converted and on unit-scaled models, in two and four processes,
against one process."""

import os
from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import fp8
from fp8.casts.casting import rounded
from tests.fp8.checkpoints.reading import same
from tests.launch import needs_gloo, run_ranks
from tests.shared import Net, assert_same, descend, pairs, parametrize, proves, refuses
from unit_scaling.transforms import unit_scale

WORLD = int(os.environ.get("WORLD", "2"))
WIDTH, TOKENS = 128, 8
SCALED = (
    ["tensor", "row"] if WORLD == 4 else "unit tensor delayed static row mxfp8".split()
)


def gated(m, x):
    return m.down(nn.functional.silu(m.gate(x)) * m.up(x))


def block():
    """Two gated branches that read the same input, after a norm, around a residual connection."""
    hidden = 4 * 128  # whole tiles of 128 for four processes
    gate, up = nn.Linear(WIDTH, hidden), nn.Linear(WIDTH, hidden)
    mlp = Net(gated, gate=gate, up=up, down=nn.Linear(hidden, WIDTH))
    norm, inner = nn.LayerNorm(WIDTH), nn.Module()
    return Net(lambda m, x: x + m.mlp(m.norm(x)), norm=norm, inner=inner, mlp=mlp)


def plan(sequence):
    columns = {"mlp.gate": ColwiseParallel(), "mlp.up": ColwiseParallel()}
    if not sequence:
        return {**columns, "mlp.down": RowwiseParallel()}
    whole = PrepareModuleInput(
        input_layouts=Shard(1),
        desired_input_layouts=Replicate(),
        use_local_output=False,
    )
    down = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
    return {"norm": SequenceParallel(), "mlp": whole, **columns, "mlp.down": down}


def full(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def model_of(kind, recipe):
    torch.manual_seed(0)
    model = block()
    if kind != "plain":
        model = unit_scale(model, batch=torch.randn(2, TOKENS, WIDTH))
    return fp8.convert(model, recipe)


def check_model(kind, recipe, sequence):
    """Outputs and gradients over two steps. Operands are the same to the bit where scales do not
    depend on the order of sums, as in the first layers. Elsewhere sums in another order may move a
    value across a tie of its rounding: sqrt(n) * 2**-24 of n terms, far below 1e-3."""
    model = model_of(kind, recipe)
    whole = deepcopy(model)
    mesh = dist.init_device_mesh("cpu", (WORLD,))
    parallelize_module(model, mesh, plan(sequence))
    for _ in range(2):
        x, g = torch.randn(2, 2, TOKENS, WIDTH)
        mine = distribute_tensor(x, mesh, [Shard(1)]) if sequence else x.clone()
        mine.requires_grad_()
        theirs = x.clone().requires_grad_()
        y, want = full(model(mine)), whole(theirs)
        y.backward(g)
        want.backward(g)
        close(y, want)
        close(full(mine.grad), theirs.grad)
        for (name, p), q in pairs(model.named_parameters(), whole.parameters()):
            close(full(p.grad), q.grad, name)
        model.zero_grad()
        whole.zero_grad()


def check_optimizers():
    """Steps of one process. Gradients are laid out otherwise than weights: those of the norm, which
    every process has, are sums of parts."""
    full32 = {"first_moment": "float32", "second_moment": "float32"}
    for options in (full32, {**full32, "min_size": 0, "weight_decay": 0.1}):
        model = model_of("plain", "unit")
        whole, mesh = deepcopy(model), dist.init_device_mesh("cpu", (WORLD,))
        parallelize_module(model, mesh, plan(sequence=True))
        optimizers = [
            fp8.optim.AdamW(m.parameters(), 0.01, **options) for m in (model, whole)
        ]
        for x in torch.randn(3, 2, TOKENS, WIDTH):
            y = full(model(distribute_tensor(x, mesh, [Shard(1)])))
            for optimizer, output in pairs(optimizers, (y, whole(x))):
                descend(optimizer, [(output - x).square().mean()])
        for (name, p), q in pairs(model.named_parameters(), whole.parameters()):
            close(full(p), q, name)


def close(got, want, name=""):
    error = ((got - want).norm() / want.norm()).item()
    assert error < 1e-3, (name, error)


def check_casts():
    """Every cast of every recipe, of operands that are divided along each dimension, to the bit."""
    mesh = dist.init_device_mesh("cpu", (WORLD,))
    sizes = torch.logspace(-4, 4, 32 * WORLD)[:, None]
    x = torch.randn(32 * WORLD, 128 * WORLD) * sizes
    zeros = x.clone()
    zeros[:32] = zeros[:, :128] = 0  # all of the first part
    nonfinite = x.clone()
    nonfinite[0, 0], nonfinite[-1, -1] = torch.inf, torch.nan
    twice = torch.stack([x, x / 7])
    casts = {
        c for r in fp8.RECIPES.values() for c in r.casts if c and not c.keeps_history
    }
    for cast in sorted((c for c in casts if not c.is_random), key=str):
        for tensor in (zeros, nonfinite, x.bfloat16()):
            for axis in (-1, -2):
                down = cast.tile[0] if axis == -1 else cast.tile[1]
                want, scale = rounded(tensor, cast, axis)
                for placement in (Replicate(), Shard(0), Shard(1)):
                    if down == 128 and placement == Shard(0):
                        continue  # 32 rows for each process
                    divided = distribute_tensor(tensor, mesh, [placement])
                    got, other = rounded(divided, cast, axis)
                    assert got.placements == (placement,)
                    same = torch.equal(full(got).nan_to_num(7), want.nan_to_num(7))
                    assert same, (cast, placement, axis)
                    assert scale is None or torch.equal(full(other), scale)
        for axis in (-1, -2):  # of which a flattened dimension is divided
            if cast.tile[0 if axis == -1 else 1] != 128:
                want, _ = rounded(twice.flatten(0, 1), cast, axis)
                divided = distribute_tensor(twice, mesh, [Shard(1)]).flatten(0, 1)
                assert_same(full(rounded(divided, cast, axis)[0]), want)
    summand = DTensor.from_local(x, mesh, [Partial()], run_check=False)
    spec = fp8.RECIPES["tensor"].input
    assert_same(full(rounded(summand, spec)[0]), rounded(WORLD * x, spec)[0])


def check_refused():
    mesh = dist.init_device_mesh("cpu", (WORLD,))
    model = fp8.convert(nn.Linear(16 * WORLD, 48), "mxfp8")
    parallelize_module(model, mesh, RowwiseParallel())
    with refuses("not made of whole tiles of 32 that share a scale"):
        model(torch.randn(4, 16))
    model = fp8.convert(nn.Linear(16 * WORLD, 48), "quartet2")
    parallelize_module(model, mesh, RowwiseParallel())
    x = distribute_tensor(torch.randn(4, 16 * WORLD), mesh, [Shard(1)]).requires_grad_()
    with refuses(r"random signs .* tensor parallelism"):
        model(x).sum().backward()
    divided = parallelize_module(nn.Linear(16, 16), mesh, ColwiseParallel())
    with refuses("weight has no level, because processes divide it"):
        fp8.initialize(divided, torch.optim.AdamW(divided.parameters()), "O2")
    with refuses("store_frozen takes whole weights"):
        fp8.store_frozen(divided.requires_grad_(False))


def check_two_dimensions(folder):
    """FSDP2 over one dimension of a mesh and tensor parallelism over the other. Checkpoints load on
    another mesh, and in one process."""
    mesh = dist.init_device_mesh("cpu", (2, WORLD // 2), mesh_dim_names=("dp", "tp"))
    for recipe in "tensor delayed row mxfp8".split():
        model = model_of("plain", recipe)
        whole = deepcopy(model)
        parallelize_module(model, mesh["tp"], plan(False))
        fully_shard(model, mesh=mesh["dp"])
        optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (model, whole)]
        for _ in range(2):
            x = torch.randn(2, TOKENS, WIDTH)
            losses = [full(m(x)).square().mean() for m in (model, whole)]
            for optimizer, loss in pairs(optimizers, losses):
                descend(optimizer, [loss])
            close(losses[0].detach(), losses[1].detach())
        for (name, p), q in pairs(model.named_parameters(), whole.parameters()):
            close(full(p), q, name)
        path = folder / f"checkpoint {recipe}"
        dcp.save(get_model_state_dict(model), checkpoint_id=path)
        other = model_of("plain", recipe)
        parallelize_module(other, dist.init_device_mesh("cpu", (WORLD,)), plan(False))
        alone = model_of("plain", recipe)
        for target in (other, alone):
            with torch.no_grad():
                for p in target.parameters():
                    p.zero_()
            state = get_model_state_dict(target)
            dcp.load(state, checkpoint_id=path)
            set_model_state_dict(target, state)
            sent = pairs(fp8.weights(target), fp8.weights(model))
            assert all(same(a, b) for (_, a), (_, b) in sent)
            saved = model.state_dict()
            for name, tensor in target.state_dict().items():
                assert torch.equal(full(tensor), full(saved[name])), name


def check_ranks(rank, store):
    torch.manual_seed(7)
    check_casts()
    check_refused()
    for recipe in SCALED:
        check_model("plain", recipe, sequence=True)
    check_model("plain", "block", sequence=False)
    check_model("unit", "unit", sequence=False)
    check_model("unit", "unit", sequence=True)
    if WORLD == 2:
        check_optimizers()
    if WORLD == 4:
        check_two_dimensions(store.parent)


@proves("the field", "tensor and sequence parallelism")
@needs_gloo
@parametrize("world", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_parallelize_module(world, tmp_path):
    run_ranks(check_ranks, world, tmp_path / "store", warnings="default")
