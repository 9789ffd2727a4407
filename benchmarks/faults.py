"""Does a warning name what a fault costs FP8 before the loss shows it?

``python -m benchmarks.faults`` trains small models under recipe "static" and injects one fault into
each run, and into its pair in high precision with the same weights and batches. A loss has left its
band at the first step at which it is not finite, or is, with the three after it, further from the
pair's than `BAND` times what FP8 costs the run without a fault (RMS); more where the pair's
loss is larger. Named: the first step from the fault on at which a warning has the name of a layer
and an operand.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import fp8
from benchmarks.common import Row, report
from benchmarks.problems import PROBLEMS, cross_entropy
from fp8.lab.preflight.training import Setup, loss_of
from fp8.warnings import PitfallWarning

STEPS, AT = 160, 40
"""Step AT is no step 2**k, at which static scales are measured."""
BAND = 3.0
LEAST = 0.003
"""The least half width of a band."""
NAMED = re.compile(r"(input|weight|grad)(?: again)? of '([\w.]+)'")


class Gated(nn.Module):
    """Experts behind norms, each times a gate; (logits, labels)."""

    def __init__(self, gates: tuple[float, ...] = (0.5, 0.5)) -> None:
        super().__init__()
        self.enter = nn.Linear(16, 64)
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in gates)
        self.up = nn.ModuleList(nn.Linear(64, 64) for _ in gates)
        self.down = nn.ModuleList(nn.Linear(64, 64) for _ in gates)
        self.gates = nn.ParameterList(torch.tensor(gate) for gate in gates)
        self.head = nn.Linear(64, 8)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = self.enter(x)
        for norm, up, down, gate in zip(
            self.norms, self.up, self.down, self.gates, strict=True
        ):
            x = x + gate * down(F.gelu(up(norm(x))))
        return self.head(F.gelu(x)), labels


def of_problem(name: str) -> Setup:
    return PROBLEMS[name](0)


def zeroed() -> Setup:
    """DiT with the modulations and the readout at zeros (arXiv:2212.09748)."""
    setup = of_problem("DiT")
    model: Any = setup.model
    for layer in (*model.modulations, model.head):
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
    return setup


def gated(*gates: float) -> Setup:
    """`Gated` with fixed gates."""
    model = Gated(gates)
    model.gates.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    return replace(of_problem("MLP"), model=model, optimizer=optimizer)


@dataclass
class Run:
    """A run that a fault changes. factor: of the loss, divided out of the gradients. change: of a
    batch. named: step -> the first layer and operand."""

    model: Any
    optimizer: Any
    factor: float = 1.0
    change: Callable[[Any], Any] = lambda batch: batch
    losses: list[float] = field(default_factory=list)
    named: dict[int, str] = field(default_factory=dict)


Act = Callable[[Run, int], None]
"""What a fault does: called with the number of steps since it began, before each of them."""


@dataclass(frozen=True)
class Fault:
    """A row of FAULTS. prepare: what is done with the converted model before the first step."""

    name: str
    setup: Callable[[], Setup]
    act: Act
    at: int = AT
    prepare: Callable[[nn.Module, Any], None] | None = None
    recipe: str = "static"
    ranks: int = 1


# What goes wrong


def rate(factor: float, steps: int = STEPS) -> Act:
    """Another learning rate for some steps."""

    def act(run: Run, since: int) -> None:
        change = {0: factor, steps: 1 / factor}.get(since, 1.0)
        for group in run.optimizer.param_groups:
            group["lr"] *= change

    return act


def warmup(run: Run, since: int) -> None:
    """From a thousandth of the rate, by a quarter in each step."""
    for group in run.optimizer.param_groups:
        group["lr"] = 2e-3 * min(1e-3 * 1.25**since, 1.0)


def loss_times(factor: float) -> Act:
    def act(run: Run, since: int) -> None:
        run.factor = factor

    return act


def batches(change: Callable[[Any], Any], rank: int = 0, steps: int = STEPS) -> Act:
    """Another kind of batch, in one process, for some steps."""

    def act(run: Run, since: int) -> None:
        here = not dist.is_initialized() or dist.get_rank() == rank
        run.change = change if here and since < steps else lambda batch: batch

    return act


def larger(factor: float) -> Callable[[Any], Any]:
    return lambda batch: (batch[0] * factor, *batch[1:])


def with_nan(batch: Any) -> Any:
    return batch[0].where(batch[0] < 9, math.nan), *batch[1:]


def weights(name: str, factor: float, every: bool = False) -> Act:
    """Multiplies the weights of the layers of a name, once or in every step."""

    @torch.no_grad()
    def act(run: Run, since: int) -> None:
        for path, parameter in run.model.named_parameters():
            if path == name and (every or not since):
                parameter.mul_(factor)

    return act


def decay(run: Run, since: int) -> None:
    """Weight decay goes on while the learning rate has ended."""
    rate(1e-3)(run, since)
    weights("enter.weight", 0.8, every=True)(run, since)


def thawed(run: Run, since: int) -> None:
    run.model.gates.requires_grad_(True)


@torch.no_grad()
def revived(run: Run, since: int) -> None:
    for gate in run.model.gates:
        gate.fill_(0.5)


def other_scales(run: Run, since: int) -> None:
    """The scales of a checkpoint of another run."""
    scales = {} if since else fp8.calibration(run.model)
    if scales:
        moved = {name: e and e - 14 for name, e in scales.items()}
        fp8.calibrate(run.model, scales=moved)


def frozen(model: nn.Module, batch: Any) -> None:
    """Calibrated on data of another size."""
    fp8.calibrate(model, larger(1e-5)(batch), cross_entropy, freeze=True)


def same(run: Run, since: int) -> None:
    """Nothing during training: the fault is in the setup."""


def noisy(batch: Any) -> Any:
    """A fifth of the targets is wrong by orders of magnitude."""
    noise = batch[2].clone()
    noise[: len(noise) // 5] *= 1e6
    return *batch[:2], noise


MLP, GPT, RESNET = (partial(of_problem, name) for name in ("MLP", "GPT-2", "residual"))
LLAMA, UNET, DENOISER = (
    partial(of_problem, name) for name in ("Llama", "UNet", "diffusion MLP")
)
LATE = partial(gated, 0.5, 1e-7)
GAIN = weights("model.layers.1.input_layernorm.weight", 2.0**14)
FAULTS = (
    Fault("learning rate x 100", MLP, rate(100.0)),
    Fault("spike of the warmup, x 300 for 3 steps", LLAMA, rate(300.0, 3)),
    Fault("gate of a branch thawed late", LATE, thawed),
    Fault("dead expert revived", LATE, revived),
    Fault("inputs x 1000", MLP, batches(larger(1e3))),
    Fault("inputs of one rank x 10^4", MLP, batches(larger(1e4), 1), ranks=2),
    Fault("noise of another schedule, x 2000", UNET, batches(larger(2e3))),
    Fault("frozen scales of other data", MLP, same, 0, prepare=frozen),
    Fault("zero-initialized layers and a warmup", zeroed, warmup, 0),
    Fault("loss scale x 2^16", GPT, loss_times(2.0**16)),
    Fault("loss scale / 2^24", LLAMA, loss_times(2.0**-24)),
    Fault("gradients accumulated by sums", RESNET, loss_times(2.0**18)),
    Fault("wrong targets", DENOISER, batches(noisy, steps=4)),
    Fault("checkpoint with other scales", MLP, other_scales),
    Fault("weight decay to nothing", partial(gated, 0.5, 0.5), decay),
    Fault("weights x 2^12", RESNET, weights("blocks.2.second.weight", 2.0**12)),
    Fault("gain of a norm x 2^14", LLAMA, GAIN),
    Fault("NaN in one batch", MLP, batches(with_nan, steps=1)),
    Fault("recipe unit, plain model", LLAMA, same, 0, recipe="unit"),
    Fault("first batch a dummy", MLP, batches(larger(1e-6), steps=1), 0),
)


# Runs


def trained(fault: Fault, recipe: str, harmed: bool) -> Run:
    """A run under a recipe ("": high precision), with the fault or without."""
    torch.manual_seed(0)
    setup = fault.setup()
    model: Any = setup.model
    drawn = list(itertools.islice(setup.batches, STEPS))
    if recipe:
        fp8.convert(model, recipe)
        if harmed and fault.prepare is not None:
            fault.prepare(model, drawn[0])
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    run = Run(model, setup.optimizer)
    for step, batch in enumerate(drawn):
        if harmed and step >= fault.at:
            fault.act(run, step - fault.at)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            train_step(run, batch, setup.loss)
        for each in seen:
            found = NAMED.search(str(each.message))
            if issubclass(each.category, PitfallWarning) and found:
                run.named.setdefault(step, f"{found[2]}, {found[1]}")
    return run


def train_step(run: Run, batch: Any, loss: Any) -> None:
    run.optimizer.zero_grad()
    value = loss_of(run.model, run.change(batch), loss)
    (run.factor * value).backward()
    mean = value.detach()
    if dist.is_initialized():
        dist.all_reduce(mean)
        mean = mean / dist.get_world_size()
    run.losses.append(float(mean))
    for group in run.optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad /= run.factor
    run.optimizer.step()


Outcome = dict[str, Any]


def outcome(fault: Fault) -> Outcome:
    """The step that is out of the band, and the steps at which a layer is named."""
    runs = {
        key: trained(fault, *key)
        for key in (("", False), ("static", False), ("", True), (fault.recipe, True))
    }
    plain, healthy, pair, run = runs.values()
    costs = [(a - b) ** 2 for a, b in zip(healthy.losses, plain.losses, strict=True)]
    width = max(BAND * math.sqrt(sum(costs) / STEPS), LEAST)
    usual = sum(plain.losses) / STEPS
    out = []
    for a, b in zip(run.losses, pair.losses, strict=True):
        grown = max(abs(b) / usual, 1.0) if math.isfinite(b) else 1.0
        out.append(not math.isfinite(a) or abs(a - b) > width * grown)
    bad = [not math.isfinite(loss) for loss in run.losses]
    leaves = [i for i in range(STEPS) if bad[i] or all(out[i : i + 4])]
    return {
        "left": leaves[:1],
        "named": list(run.named.items()),
        "false": len(healthy.named),
    }


def in_rank(rank: int, number: int, folder: str) -> None:
    """A process of two."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    found = outcome(FAULTS[number])
    Path(folder, str(rank)).write_text(json.dumps(found))
    dist.destroy_process_group()


def measured(number: int) -> Row:
    """The row of a fault."""
    fault = FAULTS[number]
    if fault.ranks == 1:
        found = [outcome(fault)]
    else:
        with tempfile.TemporaryDirectory() as folder:
            spawn(in_rank, (number, folder), fault.ranks)
            files = [Path(folder, str(rank)) for rank in range(fault.ranks)]
            found = [json.loads(file.read_text()) for file in files]
    named = sorted(tuple(each) for one in found for each in one["named"])
    after = [each for each in named if each[0] >= fault.at]
    left = found[0]["left"]
    before = bool(after) and (not left or after[0][0] <= left[0])
    return {
        "name": fault.name,
        "recipe": fault.recipe,
        "fault": fault.at,
        "named": after[0][0] if after else None,
        "operand": after[0][1] if after else None,
        "left": left[0] if left else None,
        "before": before,
        "warnings_without": found[0]["false"],
    }


def main() -> int:
    """Trains, prints the rows and records them."""
    parser = argparse.ArgumentParser(prog="benchmarks.faults", description=__doc__)
    parser.add_argument("--only", default="", help="a part of the names of faults")
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    numbers = [i for i, fault in enumerate(FAULTS) if args.only in fault.name]
    rows: list[Row] = []
    for number in numbers:
        rows.append(measured(number))
        print(*rows[-1].values(), sep=" | ", flush=True)
    question = (
        f"{STEPS} steps with a fault from the step on that is given: the step that names a layer "
        "and an operand, the step at which the loss leaves that of high precision with the same "
        "fault, and whether the name came first"
    )
    if not args.only:
        report("faults", question, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
