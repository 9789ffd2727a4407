"""One of two processes of test_fsdp: ``python fsdp_worker.py RANK STORE``.

FSDP2 that gathers weights in FP8 against one process whose products round them the same way.
"""

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import fp8
import unit_scaling as uu
from fp8.distributed.fsdp import gather_in_fp8, portable_state_dict, update_scales
from tests.fp8.distributed.sharded_models import make, make_fp8, numbers, optimizer, step, step_fp8
from tests.launch import as_rank
from tests.unit_scaling import distributed_worker as unit_scaled
from unit_scaling.transforms import unit_scale


class Gathered(TorchDispatchMode):
    """Counts the bytes that this process sends in all-gathers, and the all-reduces."""

    sent = reduced = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "allgather" in function.name():
            self.sent += args[1].numel() * args[1].element_size()
        self.reduced += "allreduce" in function.name()
        return function(*args, **(kwargs or {}))


def net(recipe: str) -> nn.Module:
    """33 rows, so that the last process has fewer."""
    torch.manual_seed(0)
    layers = [nn.Linear(20, 33), nn.GELU(), nn.Linear(33, 5, bias=False)]
    return fp8.convert(nn.Sequential(*layers), recipe)


@torch.no_grad()
def rounded(plain: nn.Module, model: nn.Module, recipe: str) -> None:
    """Gives `plain` the parameters of `model`; in 16 bits, rounded once, from 32."""
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        p = p.full_tensor() if isinstance(p, DTensor) else p
        if q.dtype == torch.bfloat16 and q.dim() == 2:
            scale = 2 ** (p.abs().max() / 448).log2().ceil() if recipe == "tensor" else None
            p = fp8.quantize(p, "e4m3", scale=scale)
        q.copy_(p)


def check_equal(recipe: str, policy: MixedPrecisionPolicy, dtype: torch.dtype | None) -> None:
    """Outputs and gradients are those of one process to the bit, over steps and accumulation."""
    model = net(recipe)
    plain = copy.deepcopy(model).to(dtype)
    rounded(plain, model, recipe)
    gather_in_fp8(model, recipe)
    for part in (model[0], model):
        fully_shard(part, mp_policy=policy)
    opt = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        x = torch.randn(8, 20)
        for _ in range(2):
            y, expected = model(x), plain(x.to(dtype))
            assert torch.equal(y, expected)
            y.square().mean().backward()
            expected.square().mean().backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad.float(), rtol=1e-6, atol=1e-7)
        opt.step()
        opt.zero_grad()
        plain.zero_grad()
        rounded(plain, model, recipe)
        update_scales(model)


def check_bytes() -> None:
    """Weights in a quarter of the bytes; one all-reduce for all scales, or one for each."""
    counted = {}
    for kind in ("plain", "unit", "tensor"):
        model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
        if kind != "plain":
            gather_in_fp8(model, kind)
        fully_shard(model, reshard_after_forward=True)
        with Gathered() as gathered:
            model(torch.randn(2, 64))
        counted[kind] = gathered.sent
        assert gathered.reduced == 2 * (kind == "tensor")
        with Gathered() as gathered:
            update_scales(model)
            model(torch.randn(2, 64))
        assert gathered.reduced == (kind == "tensor")
        with torch.no_grad():
            model[0].weight.mul_(2)  # its scale is another
        with Gathered() as gathered:
            model(torch.randn(2, 64))
        assert gathered.reduced == (kind == "tensor")
    assert counted["plain"] == 2 * 64 * 64 * 4 / 2
    assert counted["unit"] == counted["tensor"] == counted["plain"] / 4


def check_unit_scaled() -> None:
    """Tags, learning rates and training: of the library's modules, and of a model that it scaled;
    cut by rows and by columns."""
    torch.manual_seed(0)
    model = fp8.convert(unit_scaled.Model().double(), "unit")

    def by_columns(m: nn.Module) -> nn.Module:
        gather_in_fp8(m, "unit")
        return unit_scaled.sharded(m, list(m.blocks))

    unit_scaled.check(copy.deepcopy(model), by_columns, 1)
    vocab, width = unit_scaled.VOCAB, unit_scaled.WIDTH
    layers = [nn.Embedding(vocab, width), nn.LayerNorm(width), nn.Linear(width, vocab)]
    scaled = fp8.convert(unit_scale(nn.Sequential(*layers).double()), "unit")
    tokens = torch.randint(vocab, (unit_scaled.BATCH, 5))
    unit_scaled.train(scaled, [tokens], steps=1, loss=F.cross_entropy)

    def by_rows(m: nn.Module) -> nn.Module:
        gather_in_fp8(m, "unit")
        return fully_shard(m)

    unit_scaled.check(scaled, by_rows, 1, F.cross_entropy)


def check_checkpoint(folder: Path) -> None:
    """What one process saved is loaded by two, who train on and save for one."""
    model, opt = make(seed=1)
    gather_in_fp8(model, "unit")
    fully_shard(model)
    opt = uu.optim.AdamW(model.parameters(), 0.1)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, opt), strict=True))
    dcp.load(state, checkpoint_id=folder / "of_one")
    set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    one, other = make(seed=0)
    step(one, other)
    for p, q in zip(model.parameters(), one.parameters(), strict=True):
        assert isinstance(p, DTensor)
        assert torch.equal(p.full_tensor(), q)
    step(model, opt)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, opt), strict=True))
    dcp.save(state, checkpoint_id=folder / "of_two")
    sharded = {n: p for n, p in model.state_dict().items() if isinstance(p, DTensor)}
    full: dict[str, Tensor] = {n: p.full_tensor() for n, p in sharded.items()}
    assert {type(t) for t in full.values()} == {Tensor}
    shards = {n: p.to_local() for n, p in sharded.items()}
    assert {type(t) for t in shards.values()} == {Tensor}
    pickled = {n: p.to_local() for n, p in model.named_parameters()}  # with FSDP2's own view
    torch.save(pickled, folder / f"{dist.get_rank()}")
    for name, tensor in torch.load(folder / f"{dist.get_rank()}", weights_only=True).items():
        assert type(tensor) in (Tensor, nn.Parameter)
        assert torch.equal(tensor, shards[name])


def check_fp8_states(folder: Path) -> None:
    """Of moments in FP8, each shard has scales of its own: loaded from one process, for one."""
    model = make_fp8(seed=1)
    gather_in_fp8(model, "unit")
    opt = optimizer(fully_shard(model))
    step_fp8(model, opt)
    state = {"model": model.state_dict(), "opt": portable_state_dict(opt)}
    dcp.load(state, checkpoint_id=folder / "fp8_of_one")
    model.load_state_dict(state["model"])
    opt.load_state_dict(state["opt"])
    assert "exp_avg_values" in opt.state[model[0].weight]
    one = make_fp8(seed=0)
    its_opt = optimizer(one)
    step_fp8(one, its_opt)
    for mine, expected in zip(numbers(opt), numbers(its_opt), strict=True):
        assert (mine - expected).norm() <= 2**-4 * expected.norm()  # rounded once more
    step_fp8(model, opt)
    state = {"model": model.state_dict(), "opt": portable_state_dict(opt)}
    dcp.save(state, checkpoint_id=folder / "fp8_of_two")
    check_resumed(folder, model, opt)
    check_skipped(model, opt)


def check_resumed(folder: Path, model: nn.Module, opt: torch.optim.Optimizer) -> None:
    """As any trainer saves a sharded optimizer: each process has the numbers of its own shard."""
    other = make_fp8(seed=5)
    gather_in_fp8(other, "unit")
    its_opt = optimizer(fully_shard(other))
    states = [
        dict(zip(("model", "opt"), get_state_dict(m, o), strict=True))
        for m, o in ((model, opt), (other, its_opt))
    ]
    dcp.save(states[0], checkpoint_id=folder / "resumed")
    dcp.load(states[1], checkpoint_id=folder / "resumed")
    loaded = {"model_state_dict": states[1]["model"], "optim_state_dict": states[1]["opt"]}
    set_state_dict(other, its_opt, **loaded)
    for mine, expected in zip(numbers(its_opt), numbers(opt), strict=True):
        assert torch.equal(mine, expected)
    assert "exp_avg_values" in its_opt.state[other[0].weight]


def check_skipped(model: nn.Module, opt: torch.optim.Optimizer) -> None:
    """A gradient that is not finite in one shard: no process takes the step."""
    before = {n: p.to_local().clone() for n, p in model.named_parameters()}
    if dist.get_rank() == 1:
        model[0].weight.grad.to_local().view(-1)[0] = torch.nan
    opt.step()
    assert opt.skipped_steps == 1
    assert all(torch.equal(p.to_local(), before[n]) for n, p in model.named_parameters())


def check_skipped_steps() -> None:
    """NaN in one shard skips the step on both; of a weight of one row, one shard is empty."""
    for formats in ({}, {"first_moment": "e4m3_block", "second_moment": "e5m3_block"}):
        model = nn.Sequential(nn.Linear(20, 65), nn.Linear(65, 1))
        fully_shard(model)
        opt = fp8.optim.AdamW(model.parameters(), 1e-2, min_size=0, **formats)
        for i in range(3):
            model(torch.randn(4, 20)).square().mean().backward()
            if i == 1 and dist.get_rank() == 0:
                model[1].bias.grad.to_local().fill_(torch.nan)
            opt.step()
            opt.zero_grad()
        assert opt.skipped_steps == 1
        for i, state in portable_state_dict(opt)["state"].items():
            assert state["step"] == 2
            assert state["exp_avg"].full_tensor().shape == list(model.parameters())[i].shape


def check_sgd() -> None:
    """A step of a shard is that of the whole weight, also after the weight was written."""
    models = [nn.Linear(20, 65).bfloat16() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    fully_shard(models[0])
    optimizers = [
        fp8.optim.SGD(m.parameters(), 0.1, momentum=0.9, master_weights="float16") for m in models
    ]
    for i in range(3):
        x = torch.randn(4, 20, dtype=torch.bfloat16)
        for model, opt in zip(models, optimizers, strict=True):
            model(x).square().mean().backward()
            opt.step()
            opt.zero_grad()
            if i == 1:
                with torch.no_grad():
                    model.weight.mul_(0.5)
                opt.step()
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(p.full_tensor(), q)


def main(rank: int, store: Path) -> None:
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for recipe in ("unit", "tensor"):
        check_equal(recipe, MixedPrecisionPolicy(), None)
        check_equal(recipe, bf16, torch.bfloat16)
    check_bytes()
    check_unit_scaled()
    check_checkpoint(store.parent)
    check_fp8_states(store.parent)
    check_skipped_steps()
    check_sgd()
    model = fully_shard(nn.Linear(4, 4))
    with pytest.raises(ValueError, match="weight is sharded: call gather_in_fp8"):
        gather_in_fp8(model)
    with pytest.raises(ValueError, match="unit_scale copies the model, which FSDP has sharded"):
        unit_scale(model)
    with pytest.raises(ValueError, match="store_frozen takes whole weights"):
        fp8.store_frozen(model.requires_grad_(False))


if __name__ == "__main__":
    as_rank(main, 2)
