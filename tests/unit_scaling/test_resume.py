"""An optimizer of unit_scaling resumes: in any order of the model's first call and of what is
loaded, in other processes, forms of checkpoints, trainers and levels, and for models without tags.
"""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import lr_scheduler

import fp8
import unit_scaling as uu
from fp8.training.levels import LEVELS
from tests.fp8.adapters import hub_models
from tests.unit_scaling.test_groups import ROOT, by_rate, momentum, train
from tests.unit_scaling.test_optim import each_optimizer, lrs, parameters
from unit_scaling.optim import SGD, Adam, AdamW  # noqa: F401 - by name in another process
from unit_scaling.parameter import tag
from unit_scaling.transforms import unit_scale

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    lightning = pytest.importorskip("lightning")
    transformers = hub_models.transformers


def saved(*things: Any) -> Any:
    file = io.BytesIO()
    torch.save(things, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = uu.Linear(8, 16, bias=True), uu.LayerNorm(16)
        self.last = uu.LinearReadout(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.norm(self.first(x))))


def steps(model: nn.Module, opt: Any, seeds: Any) -> dict[str, torch.Tensor]:
    for seed in seeds:
        opt.zero_grad()
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(seed))
        model(x).square().sum().backward()
        opt.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def plain_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 4)
    )


def resume(model: nn.Module, cls: Any, states: Any, order: Any, **settings: Any) -> Any:
    """The parameters after two more steps. order: of the model's first call, the loading of its
    values, the making of the optimizer and the loading of its state."""
    opt: Any = None
    for event in order:
        if event == "call":
            with torch.no_grad():
                model(torch.randn(8, 8, generator=torch.Generator().manual_seed(9)))
        elif event == "model":
            model.load_state_dict(states[0])
        elif event == "make":
            opt = cls(model.parameters(), 0.3, **settings)
        else:
            opt.load_state_dict(states[1])
    return steps(model, opt, range(3, 5))


EVENTS = ("call", "model", "make", "optimizer")
ORDERS = [
    order
    for order in itertools.permutations(EVENTS)
    if order.index("make") < order.index(EVENTS[3])
]


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
@each_optimizer
def test_resumed_in_any_order(cls: Any, order: Any):
    settings = {"weight_decay": 1e-3, **momentum(cls)}
    torch.manual_seed(0)
    model = unit_scale(plain_net())
    opt = cls(model.parameters(), 0.1, **settings)
    steps(model, opt, range(3))
    states = saved(model.state_dict(), opt.state_dict())
    expected = steps(model, opt, range(3, 5))
    torch.manual_seed(5)
    fresh = unit_scale(plain_net())
    torch.testing.assert_close(resume(fresh, cls, states, order, **settings), expected)


@each_optimizer
def test_a_state_dict_from_before_the_first_call_fixes_no_rates(cls: Any):
    """As accelerate loads one when it moves an optimizer to a device."""
    results = []
    for is_loaded in (True, False):
        model = unit_scale(plain_net())
        opt = cls(model.parameters(), 0.1)
        if is_loaded:
            opt.load_state_dict(copy.deepcopy(opt.state_dict()))
            assert "set by the first call" in repr(opt)
        results.append(steps(model, opt, range(3)))
    torch.testing.assert_close(*results, rtol=0, atol=0)


RESUME = """
import sys, torch
sys.path.insert(0, "")
from tests.unit_scaling import test_resume as t
cls = getattr(t, sys.argv[1])
path = sys.argv[2]
settings = t.momentum(cls)
result = t.resume(t.Net(), cls, torch.load(path), ["make", "optimizer", "model"], **settings)
torch.save(result, path)
"""


@each_optimizer
def test_resumed_in_another_process(cls: Any, tmp_path: Path):
    torch.manual_seed(0)
    model, path = Net(), tmp_path / "checkpoint.pt"
    opt = cls(model.parameters(), 0.1, **momentum(cls))
    steps(model, opt, range(3))
    torch.save((model.state_dict(), opt.state_dict()), path)
    command = [sys.executable, "-W", "error", "-c", RESUME, cls.__name__, str(path)]
    subprocess.run(command, check=True, cwd=ROOT)
    torch.testing.assert_close(torch.load(path), steps(model, opt, range(3, 5)))


@each_optimizer
def test_a_plain_model_resumes_at_the_saved_rates(cls: Any):
    """Without tags, as in a process without the transform, or with others, until these change."""
    given = parameters()
    tag(given[0], "weight", mup_divisor=0.5)
    settings = {"weight_decay": 1e-3, **momentum(cls)}
    opt = cls(given, 0.1, **settings)
    train(opt)
    values, state = saved([p.data for p in given], opt.state_dict())
    plain = [nn.Parameter(x.clone()) for x in values]
    other = cls(plain, 0.5, allow_non_unit_scaling_params=True, **settings)
    other.load_state_dict(state)
    assert lrs(other) == lrs(opt)
    for _ in range(2):
        train(opt)
        train(other)
        torch.testing.assert_close(plain, given, rtol=0, atol=0)
        other = pickle.loads(pickle.dumps(other))  # the record is in the groups
        plain = other.param_groups[0]["params"]
    tagged = [uu.Parameter(x.clone(), "bias") for x in values]
    another = cls(tagged, 0.5, **settings)
    another.load_state_dict(state)
    assert lrs(another) == lrs(opt)
    tag(tagged[0], "output", 3)
    assert lrs(another)[0] != lrs(opt)[0]
    assert lrs(another)[1:] == lrs(opt)[1:]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("flat", [False, True])
@each_optimizer
def test_distributed_checkpoints(cls: Any, flat: bool, tmp_path: Path):
    torch.manual_seed(0)
    model = Net()
    opt = cls(model.parameters(), 0.1, weight_decay=1e-3, **momentum(cls))
    steps(model, opt, range(3))
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    values, state = copy.deepcopy((model.state_dict(), opt.state_dict()))
    dcp.save(get_optimizer_state_dict(model, opt, options=options), checkpoint_id=tmp_path)
    expected = steps(model, opt, range(3, 5))
    model.load_state_dict(values)
    model.zero_grad()
    fresh = cls(model.parameters(), 0.3, weight_decay=1e-3, **momentum(cls))
    loaded = get_optimizer_state_dict(model, fresh, options=options)
    dcp.load(loaded, checkpoint_id=tmp_path)
    set_optimizer_state_dict(model, fresh, loaded, options=options)
    assert fresh.state_dict()["param_groups"] == state["param_groups"]
    torch.testing.assert_close(steps(model, fresh, range(3, 5)), expected)


@pytest.mark.parametrize("made", [torch.optim.AdamW, fp8.optim.AdamW], ids=lambda c: c.__module__)
def test_an_optimizer_that_reads_no_factors_refuses_to_step(made: Any):
    opt = AdamW(parameters(), 0.1)
    other = made([nn.Parameter(p.detach().clone()) for p in parameters()])
    other.load_state_dict(opt.state_dict())
    with pytest.raises(ValueError, match=r"has loaded a state_dict of unit_scaling\.optim"):
        train(other)
    with pytest.raises(ValueError, match="would step all parameters at one rate"):
        train(other)


# Levels


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("cls", [Adam, AdamW])
def test_rates_hold_at_a_level(cls: Any, level: str):
    """The steps of fp8.optim in groups by rate; tags that change; copies; hooks; skipped steps."""
    results = []
    for make in (cls, lambda *args, **settings: by_rate(cls, *args, **settings)):
        torch.manual_seed(0)
        model = Net()
        count: list[int] = []
        tag(model.last.weight, "weight")
        if make is not cls:
            tag(model.last.weight, "output")
        opt = make(model.parameters(), 0.1, weight_decay=1e-3)
        _, opt = fp8.initialize(model, opt, level, recipe=None)
        tag(model.last.weight, "output")
        opt.register_step_post_hook(lambda *args, count=count: count.append(1))
        steps(model, opt, range(3))
        assert len(count) == 3
        model.first.bias.grad = torch.full_like(model.first.bias, torch.inf)
        opt.step()
        assert opt.skipped_steps == 1
        assert {group["skipped_steps"] for group in opt.param_groups} == {1}
        model, opt = copy.deepcopy((model, opt))
        for group in opt.param_groups:
            group["lr"] /= 2
        results.append(steps(model, opt, range(3, 6)))
        assert opt.skipped_steps == 1
        assert (len(opt.param_groups) == 1) == (make is cls)
    ours, theirs = ({n: p.to(torch.float32) for n, p in each.items()} for each in results)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


# Trainers, with a schedule that sets a rate


def one_cycle(opt: Any, total: int) -> Any:
    return lr_scheduler.OneCycleLR(opt, 0.5, total_steps=total + 1, cycle_momentum=False)


def rates_of_one_cycle(total: int) -> list[float]:
    opt = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
    schedule = one_cycle(opt, total)
    rates = []
    for _ in range(total):
        rates.append(schedule.get_last_lr()[0])
        opt.step()
        schedule.step()
    return rates


class Recorded(AdamW):
    """Its rates and the factors of its steps."""

    def step(self, closure: Any = None) -> Any:
        (group,) = self.param_groups
        result = super().step(closure)
        self.__dict__.setdefault("seen", []).append((group["lr"], group["mup_lr_scales"]))
        return result


class Lit(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = unit_scale(plain_net())

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        self.optimizer = Recorded(self.parameters())
        schedule = {"scheduler": one_cycle(self.optimizer, 8), "interval": "step"}
        return {"optimizer": self.optimizer, "lr_scheduler": schedule}


@pytest.mark.filterwarnings("ignore")
def test_lightning(tmp_path: Path):
    """Resumed in a new model, before its first call. All batches are equal, as Lightning starts
    another epoch."""
    data = torch.utils.data.DataLoader(
        torch.randn(4, 8, generator=torch.Generator().manual_seed(1)).repeat(4, 1), 4
    )

    def fit(steps: int, checkpoint: Path | None = None) -> Lit:
        model = Lit()
        trainer = lightning.Trainer(
            max_steps=steps,
            accelerator="cpu",
            default_root_dir=tmp_path,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, data, ckpt_path=checkpoint)
        trainer.save_checkpoint(tmp_path / f"{steps}.ckpt")
        return model

    model = fit(8)
    assert [rate for rate, _ in model.optimizer.seen] == pytest.approx(rates_of_one_cycle(8))
    scales = model.optimizer.seen[0][1]
    assert len(set(scales)) > 3
    assert all(each == scales for _, each in model.optimizer.seen)
    fit(4)
    resumed = fit(8, tmp_path / "4.ckpt")
    assert resumed.optimizer.seen == model.optimizer.seen[4:]
    torch.testing.assert_close(list(resumed.parameters()), list(model.parameters()))


@pytest.mark.filterwarnings("ignore")
def test_transformers(tmp_path: Path):
    """With a schedule of the user's, and resumed."""
    transformers.logging.set_verbosity_error()
    tokens = torch.randint(32, (32, 8), generator=torch.Generator().manual_seed(1))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    arguments = transformers.TrainingArguments(
        tmp_path,
        max_steps=8,
        save_steps=4,
        per_device_train_batch_size=4,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
    )
    trained = []
    for checkpoint in (None, str(tmp_path / "checkpoint-4")):
        torch.manual_seed(0)
        model = unit_scale(hub_models.llama(vocab_size=32, num_hidden_layers=1))
        opt = Recorded(model.parameters())
        trainer = transformers.Trainer(
            model, arguments, train_dataset=rows, optimizers=(opt, one_cycle(opt, 8))
        )
        trainer.train(resume_from_checkpoint=checkpoint)
        trained.append((opt.seen, [p.detach().clone() for p in model.parameters()]))
    (whole, values), (rest, resumed) = trained
    assert [rate for rate, _ in whole] == pytest.approx(rates_of_one_cycle(8))
    assert len(set(whole[0][1])) > 2
    assert rest == whole[4:]
    torch.testing.assert_close(resumed, values)
