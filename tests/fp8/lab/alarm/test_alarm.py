"""`fp8.lab.alarm`: real faults of FP8, of batches and of trainings, told apart; healthy runs."""

import importlib
import itertools
import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import fp8
from benchmarks.problems import PROBLEMS
from fp8.casts.watch import watch_of
from fp8.lab.alarm import Alarm, lightning_callback, transformers_callback
from fp8.lab.alarm.band import Band
from fp8.lab.preflight.training import loss_of
from fp8.recipes.history import LOOKS, Schedule
from tests.launch import needs_gloo, run_ranks
from tests.shared import linears, one_in, parametrize, quietly, refuses, sampled, seeded

pytestmark = pytest.mark.filterwarnings("ignore")  # alarms; those of the libraries
TO_NAN = fp8.Cast(format="e4m3", scaling="unit", overflow="nonfinite")
UNSCALED = fp8.Recipe(name="no scales", input=TO_NAN, weight=TO_NAN)


def network(recipe=None):
    torch.manual_seed(0)
    model = linears(16, 64, nn.GELU, 64, nn.GELU, 8)
    if recipe:
        fp8.convert(model, recipe, backend="simulate")
    return model, torch.optim.AdamW(model.parameters(), lr=2e-3)


def stale(name, factor):
    def act(model, optimizer, batch, since):
        watch_of(model).frozen = True
        if not since:
            model.get_buffer(name).mul_(factor)

    return act


def bad_batch(model, optimizer, batch, since):
    batch[1].mul_(100)


def rate(model, optimizer, batch, since):
    optimizer.param_groups[0]["lr"] = 3.0


def growing(model, optimizer, batch, since):
    model[2].weight.data.mul_(1.3)


def of_no_use(model, optimizer, batch, since):
    """An expert that no token reaches: the loss does not show it."""
    model.expert.data[0] = math.nan


def train(model, optimizer, act=None, at=90, steps=140, alarm=None, **options):
    """(alarm, the last batch) of a run with a fault from a step on."""
    alarm = alarm or Alarm(model, optimizer, every=10, **options)
    teacher = torch.randn(16, 8, generator=seeded(1))
    for step in range(steps):
        x = torch.randn(64, 16)
        batch = x, torch.tanh(x @ teacher)
        if act and step >= at:
            act(model, optimizer, batch, step - at)
        optimizer.zero_grad()
        loss = F.mse_loss(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        if alarm.step(loss, batch[:1]):
            break
    return alarm, batch


FAULTS = {
    "input": ("static", stale("2.fp8_scale_input", 2**-12), "fp8", "('2', 'input'"),
    "weight": ("static", stale("4.fp8_scale_weight", 2**12), "fp8", "('4', 'weight'"),
    "grad": ("static", stale("2.fp8_scale_grad", 2**-16), "fp8", "grad of '2' satu"),
    "batch": ("static", bad_batch, "batch", "last good weights"),
    "rate": ("tensor", rate, "training", "weights of now"),
    "norm": ("tensor", growing, "training", "2.weight has"),
    "plain": (None, growing, "training", "nothing is FP8"),
}


@parametrize("name", FAULTS)
def test_whose_fault(name):
    recipe, act, kind, said = FAULTS[name]
    model, optimizer = network(recipe)
    alarm, (x, y) = train(model, optimizer, act)
    assert alarm.alert is not None
    # Adam hides the size of a gradient: the loss stays, and the watch looks at pass 128.
    assert alarm.state.step <= (110 if name == "grad" else 90)
    before = [p.detach().clone() for p in model.parameters()]
    verdict = alarm.blame((x,), lambda out: F.mse_loss(out, y))
    assert verdict.kind == kind, verdict
    assert said in str(verdict)
    assert all(map(torch.equal, before, model.parameters()))
    assert alarm.restore() == alarm.state.step
    if recipe == "static":
        watch_of(model).frozen = False
    alarm, _ = train(model, optimizer, steps=40, alarm=alarm)
    assert alarm.alert is None
    assert len(alarm.batches) < 40


class WithLoss(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return F.mse_loss(self.net(x), x[:, :8].tanh())


def test_a_harm_that_is_small_in_each_step():
    """Gradients that saturate while weights decay: one step shows nothing, the steps since the last
    good state do."""
    net, _ = network("static")
    model = WithLoss(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9, weight_decay=0.02)
    alarm = Alarm(model, optimizer, every=10)
    for step in range(400):
        if step == 200:
            for i in (0, 2, 4):
                stale(f"{i}.fp8_scale_grad", 2**-30)(net, optimizer, None, 0)
        x = torch.randn(64, 16)
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        optimizer.step()
        if alarm.step(loss, x):
            break
    assert alarm.alert.rule == "loss above its band"
    assert alarm.blame(x).kind == "training"
    verdict = alarm.blame()
    assert verdict.kind == "fp8"
    assert "steps since the last good state" in verdict.what
    assert {rule.product for rule in verdict.blame.rules} <= {
        "grad",
        "grad_weight.grad",
        "grad_input.grad",
    }


def test_the_state_that_comes_back(tmp_path):
    """Of a file and of memory; the run goes on, and another one from the state is the same."""
    for path in (None, tmp_path / "good.pt"):
        model, optimizer = network("static")
        model.expert = nn.Parameter(torch.ones(2))
        alarm, _ = train(model, optimizer, of_no_use, path=path)
        assert alarm.alert.rule == "weights or states not finite"
        assert alarm.alert.step == 100
        assert alarm.restore() == 90
        state = alarm.state
        assert watch_of(model).schedule == Schedule(91)  # which looks, besides
        for name, tensor in model.state_dict().items():
            assert LOOKS in name or torch.equal(tensor, state.model[name])
        assert model[2].fp8_scale_input > 0
        moments = optimizer.state[model[0].weight]["exp_avg"]
        assert torch.equal(moments, state.parts[0]["state"][0]["exp_avg"])
    assert torch.load(path, weights_only=True)["step"] == 90


def test_a_checkpoint_that_is_not_finite(tmp_path):
    model, optimizer = network()
    model.register_buffer("mask", torch.tensor([0.0, -math.inf]))
    alarm, path = Alarm(model, optimizer), tmp_path / "model.pt"
    torch.save(alarm.checked(model.state_dict()), path)
    model[2].weight.data[3, 1] = math.inf
    with refuses("1 of its tensors are not finite, model.2.weight"):
        torch.save(alarm.checked({"model": model.state_dict()}), path)
    assert torch.load(path)["2.weight"].isfinite().all()
    with refuses("the state is not finite: model.2.weight"):
        Alarm(model)
    with refuses("state_dict", TypeError):
        Alarm(network()[0], "optimizer")
    with refuses("blame needs the batch"):
        alarm.blame()


@parametrize("early", [False, True])
@parametrize("kind", ["accumulated", "scaler", one_in(2, "compiled")])
def test_loops(kind, early):
    """Healthy ones: gradients of two batches, a GradScaler that skips steps, a compiled model."""
    model, optimizer = network("static")
    run = torch.compile(model, backend="aot_eager") if kind == "compiled" else model
    scaler = torch.amp.GradScaler("cpu", 2.0**10, enabled=kind == "scaler")
    alarm = Alarm(run, optimizer, scaler, every=10)
    for step in range(80):
        x = torch.randn(64, 16)
        loss = F.mse_loss(run(x), x[:, :8].tanh())
        scaler.scale(loss).backward()
        if step % 20 == 3 and kind == "scaler":
            model[0].weight.grad[0, 0] = math.inf
        if early:
            assert alarm.step(loss, x) is None
        if kind != "accumulated" or step % 2:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        if not early:
            assert alarm.step(loss, x) is None
    assert alarm.state.step >= 60
    if kind == "scaler":
        assert scaler.get_scale() < 2.0**10


@sampled(3)
@parametrize("name", ["MLP", "GRU", "diffusion MLP", "graph network", "UNet"])
def test_healthy_runs(name):
    """A warm-up, a drop of the rate, noisier data, and bad batches: no alarm. All problems, and
    more recipes, are in the docstring of the band."""
    setup = PROBLEMS[name](0)
    fp8.convert(setup.model, "static")
    alarm, usual = Alarm(setup.model, setup.optimizer), 2e-3
    for step, batch in enumerate(itertools.islice(setup.batches, 150)):
        rate = usual * min(step / 30, 1.0) * (0.1 if step > 110 else 1.0)
        setup.optimizer.param_groups[0]["lr"] = rate
        first, *rest = batch
        noise = 1.5 if step % 41 == 40 else 0.3 * (step > 70)
        first = first + noise * first.std() * torch.randn_like(first)
        setup.optimizer.zero_grad()
        loss = loss_of(setup.model, (first, *rest), setup.loss)
        loss.backward()
        setup.optimizer.step()
        assert alarm.step(loss) is None


def test_bands():
    """Falls do not widen that of a loss, which a slow rise leaves; negative losses have one."""
    for values, high in (
        ([0.98**i for i in range(200)], 0),
        ([*[0.9**i for i in range(200)], 1e-6, 1e-5], 0),
        ([1.003**i for i in range(600)], 300),
        ([-5.0, *[-5.1, -4.9] * 20, 1.0], 1),
    ):
        band = Band(falls=True)
        assert sum(map(band.add, values)) >= high
        assert bool(high) == band.add(values[-1])


def in_rank(rank, store):
    model, _ = network("static")
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    alarm = Alarm(model, optimizer, every=2)
    with quietly():
        for step in range(20):
            model(torch.randn(8, 16)).sum().backward()
            alert = alarm.step(math.nan if rank and step == 15 else 1.0)
            assert bool(alert) == (step == 15)
    assert alarm.restore() == alarm.state.step == 2


@needs_gloo
def test_ranks_agree(tmp_path):
    run_ranks(in_rank, 2, tmp_path / "store", warnings="ignore")


def test_lightning(tmp_path):
    """Stops at a NaN of FP8, names the operand, and no file has the weights that are NaN."""
    pl = pytest.importorskip("lightning.pytorch")

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layers = linears(16, 16, 16)

        def forward(self, x):
            return self.layers(x).square().mean()

        def training_step(self, x, index):
            return self(x)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    data = torch.randn(8, 4, 16)
    data[5, 0, 0] = 500.0
    module = fp8.convert(Module(), UNSCALED, backend="simulate")
    callback = lightning_callback(library="lightning", stop=True)
    checkpoint = importlib.import_module("lightning.pytorch.callbacks").ModelCheckpoint(
        tmp_path, every_n_train_steps=2, save_top_k=-1
    )
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        callbacks=[callback, checkpoint],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with refuses("not finite, state_dict.layers.0.weight"):
        trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=None))
    assert len([*Path(tmp_path).iterdir()]) == 2
    assert callback.alarm.alert.step == 6
    callback.alarm.restore()
    verdict = callback.alarm.blame(loss=lambda loss: loss)
    assert [(r.layers, r.product) for r in verdict.blame.rules] == [
        ("layers.0", "input")
    ]


def test_transformers(tmp_path):
    """A weight that becomes NaN: no alarm is needed to refuse the checkpoint."""
    pytest.importorskip("accelerate")
    hub = importlib.import_module("tests.fp8.adapters.hub_models")
    model = fp8.convert(hub.gpt2(), "static", backend="simulate")
    callback = transformers_callback(stop=True)

    class Breaks(hub.transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 5:
                model.lm_head.weight.data[0, 0] = math.nan

    arguments = hub.transformers.TrainingArguments(
        tmp_path, max_steps=8, save_steps=2, use_cpu=True, report_to=[]
    )
    ids = torch.randint(64, (16, 16))
    data = [{"input_ids": row, "labels": row} for row in ids]
    trainer = hub.transformers.Trainer(
        model, arguments, train_dataset=data, callbacks=[callback, Breaks()]
    )
    with refuses("not finite, model.transformer.wte.weight"):
        trainer.train()
    assert {path.name for path in tmp_path.iterdir()} == {
        "checkpoint-2",
        "checkpoint-4",
    }
    assert callback.alarm.alert.rule == "loss not finite"
    callback.alarm.restore()
    assert all(p.isfinite().all() for p in model.parameters())
    assert callback.alarm.blame().kind == "none"
