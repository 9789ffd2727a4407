"""Paired training runs: the same weights and batches under different policies."""

from __future__ import annotations

import copy
import math
import time
import weakref
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...casts.scaled_tensor import ScaledTensor
from ...common.copies import training_copy
from ...common.step import (
    Batch,
    Loss,
    call,
    copied,
    evaluating,
    leaves,
    loss_value,
    parameters_of,
    seeded,
    tensors_within,
    untouched,
    unwrapped,
    with_seed,
)
from ...common.validation import check_module
from ...layers.convert import convert, revert_layers
from ...layers.report import report
from ...optim.encodings import decode
from ...optim.state import SECOND, has, read
from ...recipes.policy import Policy
from ...recipes.recipe import AUTO
from .findings import Run

__all__ = ["Setup"]

# The held-out loss is averaged over this many evaluations, evenly spaced in the last fifth of the
# run. Paired runs differ by chance from step to step; the mean differs less.
EVALUATIONS = 4

Prepare = Callable[[nn.Module, Optimizer], "tuple[nn.Module, Optimizer]"]
"""Changes a model and its optimizer before a run, in place or not."""

# Setup, a tuple of its fields, or a function that returns either.
Source = Any


@dataclass(frozen=True)
class Setup:
    """The model, batches, loss and optimizer that a preflight trains.

    Attributes:
        model: with its initial or pretrained weights. It is copied, never changed. Layers that
            `fp8.convert` converted are reverted in the copy, and wrappers of torch.compile are
            left out.
        batches: an iterable of batches; each is a tensor, a tuple or list of positional arguments,
            or a mapping of keyword arguments of the model. Each pass has a copy of its batch.
        loss: a function of the model's output that returns a scalar; a module is copied with the
            model. None: the output's ``loss``, or its first 0-dim tensor that requires a gradient.
        optimizer: built on the model's parameters. None: torch's AdamW with its default arguments.
    """

    model: nn.Module
    batches: Iterable[Batch]
    loss: Loss | None = None
    optimizer: Optimizer | None = None

    def __post_init__(self) -> None:
        check_module("preflight", self.model)
        for name, parameter in self.model.named_parameters():
            if isinstance(parameter, ScaledTensor):
                raise ValueError(
                    f"preflight compares with a model in high precision, but {name} is stored in "
                    f"{parameter.format}: pass the model as it is before fp8.initialize or "
                    "fp8.store_frozen"
                )
        if not isinstance(self.batches, Iterable):
            raise TypeError(
                f"batches must be an iterable, got {type(self.batches).__name__}"
            )
        if self.loss is not None and not callable(self.loss):
            raise TypeError(f"loss must be a function of the output, got {self.loss!r}")
        if self.optimizer is None:
            return
        if not isinstance(self.optimizer, Optimizer):
            kind = type(self.optimizer).__name__
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {kind}")
        members = set(map(id, self.model.parameters()))
        if members.isdisjoint(map(id, parameters_of(self.optimizer))):
            raise ValueError("the optimizer has none of the model's parameters")


_NO_SETUP = (
    "a setup is (model, batches), (model, batches, loss) or (model, batches, loss, "
    "optimizer), got {}"
)


@dataclass
class Snapshot:
    """Copies of the model and loss of a run after a step, the second moments by name, and the batch
    that comes next. trained: the names of the parameters that the optimizer steps. beta2: the decay
    rate of second moments. seen: the share of a mean square that they hold so far, 1 - beta2 **
    steps."""

    step: int
    model: nn.Module
    loss: Loss | None
    second_moments: dict[str, Tensor]
    batch: Batch
    trained: frozenset[str]
    beta2: float = 0.999
    seen: float = 1.0


class _Start(NamedTuple):
    """The beginning of a run: a fresh copy of the model, its optimizer and its batches."""

    model: nn.Module
    optimizer: Optimizer
    loss: Loss | None
    batches: Sequence[Batch]
    held_out: Sequence[Batch]


@dataclass(frozen=True)
class _Drawn:
    """What a seed trains on: a setup, its batches, and checksums of its weights and of each batch
    when it was drawn."""

    setup: Setup
    batches: list[Batch]
    weights: int
    sums: list[int]


class _Callers(NamedTuple):
    """A parameter of the caller's model. had_grad: before the preflight."""

    # Weak, as the model of a function is not kept.

    name: str
    parameter: weakref.ref[Tensor]
    had_grad: bool


class Problem:
    """Gives every run of a seed the same weights and batches. A function is called once for each
    seed. A `Setup` is used for all seeds: seed 0 takes the batches in their order, others in a
    random order of their own."""

    def __init__(self, source: Source, steps: int, held_out: int) -> None:
        self.steps = steps
        self.held_out = held_out
        self._source = source
        self._drawn: dict[int, _Drawn] = {}
        self._callers: list[_Callers] = []
        self.steps = len(self._draw(0).batches) - held_out

    @property
    def setup(self) -> Setup:
        """What seed 0 trains."""
        return self._draw(0).setup

    @property
    def batch(self) -> Batch:
        """The first batch of seed 0."""
        return self._draw(0).batches[0]

    def shortened(self, steps: int) -> Problem:
        """The problem with its first batches only."""
        short = copy.copy(self)
        short.steps = min(steps, self.steps)
        return short

    def data(self, seed: int) -> int:
        """A checksum of the weights and batches of a seed."""
        drawn = self._draw(seed)
        sums = drawn.sums[: self.steps + self.held_out]
        return zlib.crc32(repr((drawn.weights, sums)).encode())

    def start(self, seed: int, prepare: Prepare | None = None) -> _Start:
        """A fresh copy of everything. Raises ValueError for a batch that has other values than when
        it was drawn."""
        drawn = self._draw(seed)
        count = self.steps + self.held_out
        batches = drawn.batches[:count]
        if drawn.sums[:count] != list(map(_checksum, batches)):
            raise ValueError(
                f"a batch of seed {seed} was overwritten after it was drawn: batches must not be "
                "in memory that is written again, as runs are compared on the same batches"
            )
        setup = drawn.setup
        model, optimizer, loss = training_copy(setup.model, setup.optimizer, setup.loss)
        if optimizer is None:
            parameters = [p for p in model.parameters() if p.requires_grad]
            if not parameters:
                raise ValueError(
                    f"no parameter of {type(model).__name__} requires a gradient"
                )
            optimizer = torch.optim.AdamW(parameters)
        if prepare is not None:
            model, optimizer = prepare(model, optimizer)
        # The last of the steps in use: a shortened problem holds out other batches.
        train = batches[: -self.held_out]
        held_out = batches[-self.held_out :]
        if seed and not callable(self._source):
            generator = torch.Generator().manual_seed(seed)
            order = torch.randperm(len(train), generator=generator)
            train = [train[i] for i in order.tolist()]
        return _Start(model, optimizer, loss, train, held_out)

    def _draw(self, seed: int) -> _Drawn:
        anew = callable(self._source)
        if not anew:
            seed = 0
        if seed not in self._drawn:
            with seeded(seed):
                given = value = self._source
                if anew:  # once, as another call may return something else
                    given = value = with_seed(value, seed)
                if isinstance(value, tuple | list) and 2 <= len(value) <= 4:
                    given = Setup(*value)
                if not isinstance(given, Setup):
                    raise TypeError(_NO_SETUP.format(type(value).__name__))
                if not seed:
                    self._note_callers(given.model)
                setup = _own(given, anew)
                batches, sums = self._take(setup.batches)
            weights = _checksum(setup.model.state_dict())
            self._drawn[seed] = _Drawn(setup, batches, weights, sums)
        return self._drawn[seed]

    def _note_callers(self, model: nn.Module) -> None:
        """Notes the parameters of the caller's model, which no run may read."""
        for name, parameter in unwrapped(model).named_parameters():
            had_grad = parameter.grad is not None
            self._callers.append(_Callers(name, weakref.ref(parameter), had_grad))

    def check_apart(self, loss: Tensor | None = None) -> None:
        """Raises ValueError if a run has trained or changed the caller's model. loss: one whose
        graph is read too."""
        read: set[int] = set()
        if loss is not None:
            read = {id(node.variable) for node in leaves([loss])}
        for name, parameter, had_grad in self._callers:
            tensor = parameter()
            if tensor is None:
                continue
            # A gradient that was not there: a run has called backward through the parameter.
            if id(tensor) in read or (tensor.grad is not None and not had_grad):
                raise ValueError(
                    f"a copy of the model computes with {name} of the model itself, which is not "
                    "trained: the model or the loss refers to it by a class attribute, a registry "
                    "or a global of another file. Refer to it by an attribute of the module"
                )
        if _checksum(self.setup.model.state_dict()) != self._draw(0).weights:
            raise ValueError(
                "a run of a copy of the model has changed the model itself: the model or the loss "
                "writes into it by a class attribute, a registry or a global of another file"
            )

    def _take(self, batches: Iterable[Batch]) -> tuple[list[Batch], list[int]]:
        drawn = list[Batch]()
        sums = list[int]()
        for batch in islice(batches, self.steps + self.held_out):
            # Summed as it comes, as a loader may fill one buffer again.
            drawn.append(batch)
            sums.append(_checksum(batch))
        if len(drawn) < self.held_out + 2:
            raise ValueError(
                f"batches ran out after {len(drawn)}: a preflight needs at least 2 to train and "
                f"{self.held_out} to hold out"
            )
        return drawn, sums


def _checksum(value: object) -> int:
    """Returns a checksum of the bytes of all tensors in a value. Tensors without bytes (sparse,
    meta) contribute their shapes."""
    checksum = 0
    for tensor in tensors_within(value):
        data: bytes | memoryview = repr(tuple(tensor.shape)).encode()
        with suppress(RuntimeError, TypeError, NotImplementedError):
            flat = tensor.detach().cpu().resolve_conj().resolve_neg().flatten()
            data = flat.view(torch.uint8).numpy().data
        checksum = zlib.crc32(data, checksum)
    return checksum


def _own(setup: Setup, anew: bool) -> Setup:
    """The setup with a model that is not compiled, and whose layers compute in its own precision.
    anew: whether a function made it."""
    setup = replace(setup, model=unwrapped(setup.model))
    converted = any(row.done == "converted" for row in report(setup.model))
    if anew or converted:
        # The next call of a function may initialize the same model again.
        model, optimizer, loss = training_copy(setup.model, setup.optimizer, setup.loss)
        setup = replace(setup, model=model, optimizer=optimizer, loss=loss)
    if converted:
        revert_layers(setup.model)
    return setup


def loss_of(model: nn.Module, batch: Batch, loss: Loss | None) -> Tensor:
    """0-dim. Raises ValueError if it is no scalar."""
    value = loss_value(call(model, copied(batch)), loss)
    if value is None:
        raise ValueError(
            "the loss must be a tensor of one element: the model returns it, or loss= computes it "
            "from the output; got None"
        )
    return value.reshape(())


def under(policy: Policy) -> Prepare:
    """Converts a model with ``policy``, in simulation."""

    def prepare(model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        return convert(model, policy, backend="simulate"), optimizer

    return prepare


def transformed(transform: Callable[[nn.Module], nn.Module]) -> Prepare:
    """Transforms a model and runs the result under the recipe of the transform, with its optimizer
    if it has one, or else the user's with the new parameters."""

    def prepare(model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        new = transform(model)
        its_optimizer = getattr(transform, "optimizer", None)
        if its_optimizer is not None:
            optimizer = its_optimizer(new, optimizer)
        else:
            now = dict(new.named_parameters())
            moved = {p: now.get(name, p) for name, p in model.named_parameters()}
            for group in optimizer.param_groups:
                group["params"] = [moved.get(p, p) for p in group["params"]]
        return under(Policy(getattr(transform, "recipe", AUTO)))(new, optimizer)

    return prepare


def train(
    problem: Problem,
    name: str,
    seed: int = 0,
    prepare: Prepare | None = None,
    *,
    snapshots: Sequence[int] = (),
    on_step: Callable[[], None] = lambda: None,
) -> tuple[Run, list[Snapshot]]:
    """Trains on the problem's batches and evaluates the held-out ones. A run ends at the first loss
    that is not finite; its held-out loss is then NaN. snapshots: the steps after which to take
    one."""
    start = problem.start(seed, prepare)
    model = start.model
    optimizer = start.optimizer
    run = Run(name, seed, [], math.nan, data=problem.data(seed))
    taken = []
    held = []
    steps = len(start.batches)
    last_fifth = max(steps // 5, 1)
    evaluated = {steps - last_fifth * i // EVALUATIONS for i in range(EVALUATIONS)}
    begun = time.perf_counter()
    with seeded(seed):
        model.train()
        for step, batch in enumerate(start.batches, 1):
            optimizer.zero_grad()
            loss = loss_of(model, batch, start.loss)
            run.losses.append(float(loss.detach()))
            if not math.isfinite(run.losses[-1]):
                break
            loss.backward()
            optimizer.step()
            if step in snapshots:
                taken.append(_snapshot(step, start, start.batches[step % steps]))
            if step in evaluated:
                held.append(_evaluate(start))
            on_step()
        else:
            run.held_out = sum(held) / len(held)
    run.seconds = time.perf_counter() - begun
    return run, taken


def _evaluate(start: _Start) -> float:
    model = start.model
    with evaluating(model), untouched(modules_of(model, start.loss)):
        losses = [loss_of(model, b, start.loss).item() for b in start.held_out]
    return sum(losses) / len(losses)


def modules_of(*parts: object) -> nn.ModuleList:
    """The modules among ``parts``, as one module."""
    return nn.ModuleList(part for part in parts if isinstance(part, nn.Module))


def _snapshot(step: int, start: _Start, batch: Batch) -> Snapshot:
    model = start.model
    optimizer = start.optimizer
    copied_model, _, loss = training_copy(model, None, start.loss)
    stepped = set(map(id, parameters_of(optimizer)))
    trained = {name: p for name, p in model.named_parameters() if id(p) in stepped}
    moments: dict[str, Tensor] = {}
    for name, parameter in trained.items():
        state = optimizer.state.get(parameter, {})
        if SECOND in state:
            moments[name] = state[SECOND].detach().float().clone()
        elif has(state, SECOND):  # of `fp8.optim`, in 8 or 16 bits
            moments[name] = decode(read(state, SECOND)).view(parameter.shape)
    # Adam's default where the optimizer has no betas.
    betas = (g["betas"][1] for g in optimizer.param_groups if "betas" in g)
    beta2 = float(next(betas, 0.999))
    counts = [float(state.get("step", 0)) for state in optimizer.state.values()]
    return Snapshot(
        step,
        copied_model,
        loss,
        moments,
        batch,
        frozenset(trained),
        beta2,
        seen=1 - beta2 ** max([1.0, *counts]),
    )
