"""Weights gathered in FP8 by FSDP2, and checkpoints between one process and two."""

from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import fp8
from fp8.training.fsdp import gather_in_fp8, update_scales
from tests.launch import needs_gloo, run_ranks
from tests.shared import (
    Net,
    assert_close,
    assert_same,
    both,
    descend,
    filterwarnings,
    linears,
    normal,
    pairs,
    parametrize,
    proves,
    refuses,
)
from tests.unit_scaling import distributed_worker as unit_scaled
from unit_scaling.transforms import simulate_fp8


def make(seed):
    """Large enough for scales by block; 130 rows, which two processes share evenly."""
    torch.manual_seed(seed)
    return fp8.convert(linears(20, 130, nn.GELU, 4), "unit")


def optimizer(model):
    return fp8.optim.AdamW(model.parameters(), 1e-2, min_size=0)


def step(model, opt):
    """One on a fixed batch; the loss before it."""
    x = normal(16, 20, seed=6)
    (loss,) = descend(opt, [(model(x) - x[:, :4]).square().mean()])
    return loss


def started(seed, sharded=False):
    """A model and its optimizer after one step, sharded with weights gathered in FP8."""
    model = make(seed)
    if sharded:
        gather_in_fp8(model, "unit")
        fully_shard(model)
    opt = optimizer(model)
    step(model, opt)
    return model, opt


def state_of(model, opt):
    return {"model": model.state_dict(), "opt": wide(opt)}


def load(folder, model, opt):
    """A checkpoint of any number of processes."""
    state = state_of(model, opt)
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    opt.load_state_dict(state["opt"])


def wide(opt):
    """Its state with moments in float32, which loads on another number of processes."""
    parameters = [p for group in opt.param_groups for p in group["params"]]
    other = fp8.optim.AdamW(parameters, first_moment="float32", second_moment="float32")
    other.load_state_dict(opt.state_dict())
    return other.state_dict()


def numbers(opt):
    """The moments, whole, in the order of the parameters."""
    state = wide(opt)["state"]
    moments = [
        own[name]
        for _, own in sorted(state.items())
        for name in ("exp_avg", "exp_avg_sq")
    ]
    return [m.full_tensor() if isinstance(m, DTensor) else m for m in moments]


class Gathered(TorchDispatchMode):
    """Counts the bytes that this process sends in all-gathers, and the all-reduces."""

    sent = reduced = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "allgather" in function.name():
            self.sent += args[1].numel() * args[1].element_size()
        self.reduced += "allreduce" in function.name()
        return function(*args, **(kwargs or {}))


def net(recipe):
    """33 rows, so that the last process has fewer."""
    torch.manual_seed(0)
    layers = [nn.Linear(20, 33), nn.GELU(), nn.Linear(33, 5, bias=False)]
    return fp8.convert(nn.Sequential(*layers), recipe)


@torch.no_grad()
def rounded(plain, model, recipe):
    """Gives `plain` the parameters of `model`; in 16 bits, rounded once, from 32."""
    for p, q in both(model, plain):
        p = p.full_tensor() if isinstance(p, DTensor) else p
        if q.dtype == torch.bfloat16 and q.dim() == 2:
            scale = 2 ** (p.abs().max() / 448).log2().ceil()
            p = fp8.quantize(p, "e4m3", scale=scale if recipe == "tensor" else None)
        q.copy_(p)


def check_equal(recipe, policy, dtype):
    """Outputs and gradients are those of one process to the bit, over steps and accumulation."""
    model = net(recipe)
    plain = deepcopy(model).to(dtype)
    rounded(plain, model, recipe)
    gather_in_fp8(model, recipe)
    for part in (model[0], model):
        fully_shard(part, mp_policy=policy)
    opt = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        x = torch.randn(8, 20)
        for _ in range(2):
            y, expected = model(x), plain(x.to(dtype))
            assert_same(y, expected)
            y.square().mean().backward()
            expected.square().mean().backward()
        for p, q in both(model, plain):
            mine, expected = p.grad.full_tensor(), q.grad.float()
            assert_close(mine, expected, rtol=1e-6, atol=1e-7)
        opt.step()
        opt.zero_grad()
        plain.zero_grad()
        rounded(plain, model, recipe)
        update_scales(model)


def check_static():
    """A scale that is set sends no more than the bytes; one that is not is that of the whole."""
    weight = normal(33, 20, seed=1)
    weight[17:] *= 48  # the part of one process
    for is_set in (False, True):
        model = fp8.convert(linears(20, 33), "static")
        model[0].weight.data.copy_(weight)
        plain = deepcopy(model)
        if is_set:
            fp8.calibrate(model, torch.randn(8, 20))
        gather_in_fp8(model)
        fully_shard(model)
        for reduces in (not is_set, False):
            with Gathered() as gathered:
                model(torch.ones(8, 20)).sum().backward()
            assert gathered.reduced == reduces
        plain(torch.ones(8, 20)).sum().backward()
        assert [fp8.calibration(m)["0.weight"] for m in (model, plain)] == [5, 5]


def check_bytes():
    """Weights in a quarter of the bytes; one all-reduce for all scales, or one for each."""
    counted = {}
    for kind in ("plain", "tensor"):
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(2)))
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
    assert counted["tensor"] == counted["plain"] / 4


def check_unit_scaled():
    """Tags, learning rates and training of the library's modules, cut by columns."""
    torch.manual_seed(0)
    model = fp8.convert(unit_scaled.made().double(), "unit")

    def by_columns(m):
        gather_in_fp8(m, "unit")
        return unit_scaled.sharded(m, list(m[1]))

    unit_scaled.check(model, by_columns, 1)


def check_fp8_states(folder):
    """Of moments in FP8, each shard has scales of its own: loaded from one process, for one."""
    model, opt = started(seed=1, sharded=True)
    load(folder / "fp8_of_one", model, opt)
    assert "exp_avg_values" in opt.state[model[0].weight]
    _, its_opt = started(seed=0)
    for mine, expected in pairs(numbers(opt), numbers(its_opt)):
        assert (mine - expected).norm() <= 2**-4 * expected.norm()  # rounded once more
    step(model, opt)
    dcp.save(state_of(model, opt), checkpoint_id=folder / "fp8_of_two")
    sharded = {n: p for n, p in model.state_dict().items() if isinstance(p, DTensor)}
    assert {type(p.full_tensor()) for p in sharded.values()} == {Tensor}
    # With FSDP2's own view.
    shards = {n: p.to_local() for n, p in model.named_parameters()}
    torch.save(shards, folder / f"{dist.get_rank()}")
    read = torch.load(folder / f"{dist.get_rank()}", weights_only=True)
    for name, tensor in read.items():
        assert type(tensor) in (Tensor, nn.Parameter)
        assert_same(tensor, sharded[name].to_local())
    check_resumed(folder, model, opt)


def check_resumed(folder, model, opt):
    """As any trainer saves a sharded optimizer: each process has the numbers of its own shard."""
    other = make(seed=5)
    gather_in_fp8(other, "unit")
    its_opt = optimizer(fully_shard(other))
    states = [
        dict(pairs(("model", "opt"), get_state_dict(m, o)))
        for m, o in ((model, opt), (other, its_opt))
    ]
    dcp.save(states[0], checkpoint_id=folder / "resumed")
    dcp.load(states[1], checkpoint_id=folder / "resumed")
    weights, moments = states[1].values()
    set_state_dict(other, its_opt, model_state_dict=weights, optim_state_dict=moments)
    assert_same(numbers(its_opt), numbers(opt))
    assert "exp_avg_values" in its_opt.state[other[0].weight]


def check_skipped_steps():
    """NaN in one shard skips the step on both; of a weight of one row, one shard is empty."""
    for formats in ({}, {"first_moment": "e4m3_block", "second_moment": "e5m3_block"}):
        model = linears(20, 65, 1)
        fully_shard(model)
        opt = fp8.optim.AdamW(model.parameters(), 1e-2, min_size=0, **formats)
        for i in range(3):
            model(torch.randn(4, 20)).square().mean().backward()
            if i == 1 and dist.get_rank() == 0:
                model[1].bias.grad.to_local().fill_(torch.nan)
            opt.step()
            opt.zero_grad()
        assert opt.skipped_steps == 1
        for i, state in opt.state_dict()["state"].items():
            assert state["step"] == 2
            shape = list(model.parameters())[i].shape
            assert state["exp_avg"].full_tensor().shape == shape


def check_ranks(rank, store):
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    check_equal("unit", MixedPrecisionPolicy(), None)
    check_equal("static", MixedPrecisionPolicy(), None)
    check_equal("tensor", bf16, torch.bfloat16)
    check_static()
    check_bytes()
    check_unit_scaled()
    check_fp8_states(store.parent)
    check_skipped_steps()
    model = fully_shard(nn.Linear(4, 4))
    with refuses("weight is sharded: call gather_in_fp8"):
        gather_in_fp8(model)
    with refuses("simulate_fp8 copies the model, which FSDP has sharded"):
        simulate_fp8(model)
    with refuses("store_frozen takes whole weights"):
        fp8.store_frozen(model.requires_grad_(False))


@proves("the field", "FSDP2, weights gathered in FP8")
@needs_gloo
# torch's own: there is no process group in this process, and none is needed
@filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
@pytest.mark.usefixtures("one_thread")
def test_two_processes(tmp_path):
    """And a checkpoint of one process is loaded by two, and theirs by one."""
    model, opt = started(seed=0)
    dcp.save(state_of(model, opt), checkpoint_id=tmp_path / "fp8_of_one")
    run_ranks(check_ranks, 2, tmp_path / "store")
    step(model, opt)
    check_fp8(tmp_path / "fp8_of_two", model, opt)


def check_fp8(folder, model, opt):
    """Two steps, the second on two processes, whose moments were rounded twice more."""
    restored, its_opt = started(seed=3)
    load(folder, restored, its_opt)
    for mine, expected in pairs(numbers(its_opt), numbers(opt)):
        assert (mine - expected).norm() <= 2**-3 * expected.norm()
    for p, q in both(model, restored):
        assert (p - q).norm() <= 2**-4 * 1e-2 * p.numel() ** 0.5  # of a step of lr 1e-2


def test_state_dicts_are_plain(tmp_path):
    """Through safetensors and a checkpoint file: the same names, and training goes on as before."""
    model = make(seed=0)
    names = list(model.state_dict())
    gather_in_fp8(model, "unit")
    opt = optimizer(model)
    assert list(model.state_dict()) == names
    step(model, opt)
    save_file(model.state_dict(), tmp_path / "weights")
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, tmp_path / "all")
    loaded = torch.load(tmp_path / "all", weights_only=True)
    assert {type(t) for t in loaded["model"].values()} == {torch.Tensor}
    expected = [step(model, opt) for _ in range(3)]
    for weights in (loaded["model"], load_file(tmp_path / "weights")):
        restored = make(seed=1)
        its_opt = optimizer(restored)
        restored.load_state_dict(weights)
        its_opt.load_state_dict(deepcopy(loaded["opt"]))
        assert [step(restored, its_opt) for _ in range(3)] == expected


def test_report_names_what_is_left_alone():
    model = Net(
        tied=nn.Embedding(8, 4),
        head=nn.Linear(4, 8),
        conv=nn.Conv1d(2, 2, 3),
        norm=nn.LayerNorm(4),
        first=nn.Linear(4, 4),
        second=nn.Linear(4, 4),
    )
    model.head.weight = model.tied.weight
    model.second.weight = model.first.weight
    model.first.weight.requires_grad_(False).mup_type = "weight"
    report = gather_in_fp8(model, where=lambda name, layer: name != "conv")
    assert [(row.path, row.done, row.why) for row in report] == [
        ("tied", "left alone", "its weight is no operand of a product"),
        ("head", "left alone", "a module that is not sent so shares its weight"),
        ("conv", "left alone", "not chosen"),
        ("first", "sent as e4m3, tensor", ""),
        ("second", "sent as e4m3, tensor", ""),
    ]
    weight = model.first.weight
    assert model.second.weight is weight
    assert (weight.mup_type, weight.requires_grad) == ("weight", False)
    update_scales(model)  # nothing is sharded
    again = gather_in_fp8(model)
    assert [row.why for row in again][2:] == ["", *["its weight is a _Weight"] * 2]


def sent(recipe, **options):
    model = linears(16, 16, 16, 16)
    model[2].weight = model[1].weight
    fp8.convert(model, recipe, **options)
    report = gather_in_fp8(model)
    assert model[1].weight is model[2].weight  # what is tied stays tied
    return [row.why.partition(" has ")[0] or row.done for row in report]


def test_layers_are_sent_as_they_compute():
    """What a conversion leaves in high precision is not rounded on its way, nor twice."""
    shared = "a module that is not sent so shares its weight"
    high = "it computes in high precision, or will after a switch"
    assert sent("tensor") == ["sent as e4m3, tensor"] * 3
    assert sent("unit_e4m3") == ["sent as e4m3, unit"] * 3
    assert sent("static") == ["sent as e4m3, static"] * 3
    assert sent("mxfp8") == ["recipe 'mxfp8'"] * 3
    chosen = sent("tensor", where=lambda name, layer: name != "1")
    assert chosen == ["sent as e4m3, tensor", high, shared]
    policy = fp8.Policy("tensor", rules=[("1", None, "bf16")])
    assert sent(policy) == ["sent as e4m3, tensor", "recipe 'bf16'", shared]
    assert sent(fp8.Policy("tensor", switch=[(0.9, "bf16")])) == [high] * 3


@parametrize(
    "recipe, message",
    [
        ("row", "scaling 'row', which goes along what FSDP2 cuts"),
        ("mxfp8", "scaling 'mx'"),
        ("delayed", "scaling 'delayed'"),
        ("bf16", "has no FP8 dtype for weights, got bf16"),
        (fp8.Recipe(name="none"), "has no FP8 dtype for weights, got None"),
        (
            fp8.Recipe(
                name="two", weight=fp8.Cast(format="e4m3"), grad_input_weight=None
            ),
            "casts weights anew",
        ),
        ("nine", "unknown recipe 'nine'"),
    ],
)
def test_other_recipes_are_refused(recipe, message):
    with refuses(message):
        gather_in_fp8(nn.Linear(4, 4), recipe)
    with refuses(r"needs an nn.Module, got list", TypeError):
        gather_in_fp8([])


def test_static_scales_are_those_of_converted_layers():
    report = gather_in_fp8(linears(4, 4), "static")
    assert [row.why.partition(":")[0] for row in report] == [
        "a static scale belongs to a converted layer"
    ]
