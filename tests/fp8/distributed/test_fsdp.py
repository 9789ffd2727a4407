"""Weights gathered in FP8 by FSDP2, and checkpoints between one process and two."""

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import fp8
import unit_scaling as uu
from fp8.distributed.fsdp import gather_in_fp8, portable_state_dict, update_scales
from tests.fp8.distributed.sharded_models import make, make_fp8, numbers, optimizer, step, step_fp8
from tests.launch import run_ranks

WORKER = Path(__file__).with_name("fsdp_worker.py")


@pytest.mark.proves("the field", "FSDP2, weights gathered in FP8", how="own")
@pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch is built without gloo")
# torch's own: there is no process group in this process, and none is needed
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
@pytest.mark.usefixtures("one_thread")
def test_two_processes(tmp_path: Path):
    model, opt = make(seed=0)
    step(model, opt)
    save(tmp_path / "of_one", model, opt)
    other = make_fp8(seed=0)
    other_opt = optimizer(other)
    step_fp8(other, other_opt)
    state = {"model": other.state_dict(), "opt": portable_state_dict(other_opt)}
    dcp.save(state, checkpoint_id=tmp_path / "fp8_of_one")
    run_ranks(WORKER, 2, tmp_path / "store")
    step(model, opt)
    restored, its_opt = make(seed=2)
    load(tmp_path / "of_two", restored, its_opt)
    # Two processes average gradients that are equal here: the sums are rounded alike.
    for p, q in zip(model.parameters(), restored.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
    for p, q in zip(model.parameters(), restored.parameters(), strict=True):
        for name, value in opt.state[p].items():
            torch.testing.assert_close(its_opt.state[q][name], value, rtol=1e-5, atol=1e-9)
    assert step(model, opt) == pytest.approx(step(restored, its_opt), rel=1e-6)

    step_fp8(other, other_opt)
    check_fp8(tmp_path / "fp8_of_two", other, other_opt)


def check_fp8(folder: Path, model: nn.Module, opt: torch.optim.Optimizer) -> None:
    """Two steps, the second on two processes, whose moments were rounded twice more."""
    restored = make_fp8(seed=3)
    its_opt = optimizer(restored)
    step_fp8(restored, its_opt)
    state = {"model": restored.state_dict(), "opt": portable_state_dict(its_opt)}
    dcp.load(state, checkpoint_id=folder)
    restored.load_state_dict(state["model"])
    its_opt.load_state_dict(state["opt"])
    for mine, expected in zip(numbers(its_opt), numbers(opt), strict=True):
        assert (mine - expected).norm() <= 2**-3 * expected.norm()
    for p, q in zip(model.parameters(), restored.parameters(), strict=True):
        assert (p - q).norm() <= 2**-4 * 1e-2 * p.numel() ** 0.5  # of a step of lr 1e-2


def save(folder: Path, model: nn.Module, opt: torch.optim.Optimizer) -> None:
    state = dict(zip(("model", "optimizer"), get_state_dict(model, opt), strict=True))
    dcp.save(state, checkpoint_id=folder)


def load(folder: Path, model: nn.Module, opt: torch.optim.Optimizer) -> None:
    state = dict(zip(("model", "optimizer"), get_state_dict(model, opt), strict=True))
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def test_state_dicts_are_plain(tmp_path: Path):
    """Through safetensors and a checkpoint file: the same names, and training goes on as before."""
    model, opt = make(seed=0)
    names = list(model.state_dict())
    gather_in_fp8(model, "unit")
    opt = uu.optim.AdamW(model.parameters(), 0.1)
    assert list(model.state_dict()) == names
    assert {type(t) for t in model.state_dict().values()} == {torch.Tensor}
    step(model, opt)
    save_file(model.state_dict(), tmp_path / "weights")
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, tmp_path / "all")
    loaded = torch.load(tmp_path / "all", weights_only=True)
    assert {type(t) for t in loaded["model"].values()} == {torch.Tensor}
    for weights in (loaded["model"], load_file(tmp_path / "weights")):
        restored, its_opt = make(seed=2)
        restored.load_state_dict(weights)
        its_opt.load_state_dict(copy.deepcopy(loaded["opt"]))
        losses = [step(restored, its_opt) for _ in range(3)]
        if weights is loaded["model"]:
            expected = losses
    assert losses == expected == [step(model, opt) for _ in range(3)]


def test_report_names_what_is_left_alone():
    model = nn.ModuleDict(
        {
            "tied": nn.Embedding(8, 4),
            "head": nn.Linear(4, 8),
            "conv": nn.Conv1d(2, 2, 3),
            "norm": nn.LayerNorm(4),
            "first": nn.Linear(4, 4),
            "second": nn.Linear(4, 4),
        }
    )
    model["head"].weight = model["tied"].weight
    model["second"].weight = model["first"].weight
    model["first"].weight.requires_grad_(False).mup_type = "weight"
    report = gather_in_fp8(model, where=lambda name, layer: name != "conv")
    assert [(row.path, row.done, row.why) for row in report] == [
        ("tied", "left alone", "its weight is no operand of a product"),
        ("head", "left alone", "an embedding shares its weight"),
        ("conv", "left alone", "not chosen"),
        ("first", "sent as e4m3, tensor", ""),
        ("second", "sent as e4m3, tensor", ""),
    ]
    weight = model["first"].weight
    assert model["second"].weight is weight
    assert isinstance(weight, nn.Parameter)
    assert weight.mup_type == "weight"
    assert not weight.requires_grad
    update_scales(model)  # nothing is sharded
    again = gather_in_fp8(model)
    assert [row.why for row in again][2:] == ["", *["its weight is a _Weight"] * 2]


def sent(recipe: str | fp8.Policy, **options) -> list[str]:
    layers = [nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)]
    layers[2].weight = layers[1].weight
    model = fp8.convert(nn.Sequential(*layers), recipe, **options)
    report = gather_in_fp8(model)
    assert model[1].weight is model[2].weight  # what is tied stays tied
    return [row.why.partition(" has ")[0] or row.done for row in report]


def test_layers_are_sent_as_they_compute():
    """What a conversion leaves in high precision is not rounded on its way, nor twice."""
    shared = "a module that is not sent so shares its weight"
    high = "it computes in high precision, or will after a switch"
    assert sent("tensor") == ["sent as e4m3, tensor"] * 3
    assert sent("unit_e4m3") == ["sent as e4m3, unit"] * 3
    assert sent("mxfp8") == ["recipe 'mxfp8'"] * 3
    chosen = sent("tensor", where=lambda name, layer: name != "1")
    assert chosen == ["sent as e4m3, tensor", high, shared]
    policy = fp8.Policy("tensor", rules=[("1", None, "bf16")])
    assert sent(policy) == ["sent as e4m3, tensor", "recipe 'bf16'", shared]
    assert sent(fp8.Policy("tensor", switch=[(0.9, "bf16")])) == [high] * 3


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("row", "scaling 'row', which goes along what FSDP2 cuts"),
        ("mxfp8", "scaling 'mx'"),
        ("delayed", "scaling 'delayed'"),
        ("bf16", "has no FP8 dtype for weights, got bf16"),
        (fp8.Recipe(name="none"), "has no FP8 dtype for weights, got None"),
        (
            fp8.Recipe(name="two", weight=fp8.Cast(format="e4m3"), grad_input_weight=None),
            "casts weights anew",
        ),
        ("nine", "unknown recipe 'nine'"),
    ],
)
def test_other_recipes_are_refused(recipe, message: str):
    with pytest.raises(ValueError, match=message):
        gather_in_fp8(nn.Linear(4, 4), recipe)
    with pytest.raises(TypeError, match=r"needs an nn.Module, got list"):
        gather_in_fp8([])
