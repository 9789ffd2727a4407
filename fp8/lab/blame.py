"""`fp8.blame`: whether low precision causes a loss spike, and which casts."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from itertools import combinations
from typing import NamedTuple, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from ..common.copies import training_copy
from ..common.report import as_table
from ..common.step import Batch, Loss, seeded
from ..common.validation import check_module, check_number
from ..layers.convert import convert
from ..layers.override import override
from ..layers.settings import converted
from ..recipes.policy import CASTS, LayerRule, Policy, composed
from ..recipes.recipe import OPERANDS, PRODUCTS, Recipe
from .preflight.training import loss_of
from .trace import quiet

__all__ = ["Blame", "Step", "blame"]

T = TypeVar("T")


class Step(NamedTuple):
    """A replayed step. loss: on the batch. grad_norm: the 2-norm of the gradient of all parameters.
    loss_after: on the same batch after the step of the optimizer; None without one."""

    loss: float
    grad_norm: float
    loss_after: float | None = None

    @property
    def judged(self) -> list[float]:
        """The quantities that say whether the step has a fault."""
        return [value for value in self if value is not None]


@dataclass(frozen=True, repr=False)
class Blame:
    """The result of `blame`, as a text.

    Attributes:
        rules: `LayerRule` objects that put the casts at fault into high precision; empty if low
            precision is not at fault. For `fp8.Policy`, after those that are in force.
        low, high: the step as it is, and with all products in high precision.
        repaired: the step under the rules; None without them.
        replays: the number of steps that were replayed.
    """

    low: Step
    high: Step
    rules: tuple[LayerRule, ...]
    repaired: Step | None
    replays: int

    def __str__(self) -> str:
        rows = [("as it is", self.low), ("in high precision", self.high)]
        if self.repaired is not None:
            rows.append(("under the rules", self.repaired))
        cells = []
        for name, step in rows:
            judged = [f"{value:.3g}" for value in step.judged]
            cells.append([name, *judged])
        heads = ["step", "loss", "gradient norm", "loss after it"][: len(cells[0])]
        lines = [self._answer(), "", as_table([heads, *cells])]
        if self.rules:
            rules = ", ".join(
                f"({r.layers!r}, {r.product!r}, None)" for r in self.rules
            )
            lines += ["", f"rules=[{rules}]  # of fp8.Policy, after those in force"]
        return "\n".join([*lines, f"{self.replays} steps were replayed."])

    __repr__ = __str__

    def _answer(self) -> str:
        if self.rules:
            places = ", ".join(
                f"{r.product or 'all casts'} of {r.layers}" for r in self.rules
            )
            return f"Low precision: the fault is gone with {places} in high precision."
        if not all(map(math.isfinite, self.high.judged)):
            return "Not low precision: the step is not finite in high precision either."
        return "Not low precision: the step in high precision is about as large."


def blame(
    model: nn.Module,
    batch: Batch,
    loss: Loss | None = None,
    *,
    policy: Policy | Recipe | str | None = None,
    optimizer: Optimizer | None = None,
    threshold: float = 2.0,
) -> Blame:
    """Finds the casts that make the loss of a step spike or become NaN, if casts do.

    Load the checkpoint from before the spike and pass the batch. The step is replayed as it is, and
    with all products in high precision. A step has a fault if its loss, gradient norm or loss after
    the step is not finite, or is larger than ``threshold`` times that in high precision. Where high
    precision has no fault, a bisection over layers, then over their products, then over the
    operands of these, finds a smallest set of casts whose high precision removes it: no part of the
    set does. Casts that only occur together, as of two operands that are rotated alike, are one
    part. Each takes about ``k * log2(n)`` replays, where k of n parts are at fault.

    Every replay runs on a copy of the model and optimizer, with the same random numbers: dropout
    masks do not depend on which casts are random. Neither the model nor the optimizer nor the
    states of the random number generators are changed.

    Args:
        model: a model that `fp8.convert` has converted; or one in high precision, with ``policy``.
        batch: a tensor, a tuple or list of positional arguments, or a mapping of keyword arguments.
        loss: a function of the output that returns a scalar. None: the output's ``loss``.
        policy: the policy or recipe of the copies of the model; None if the model is converted.
        optimizer: built on the model's parameters, with its state. None: no step is made, and a
            fault that only the next loss shows is not seen.
        threshold: above 1.

    Returns:
        A `Blame`.

    Raises:
        TypeError: if ``model`` is not a module, or ``threshold`` no number.
        ValueError: if no layer is converted, if the loss is no scalar that requires a gradient, and
            for a threshold of at most 1.

    >>> import torch, fp8
    >>> model = fp8.convert(torch.nn.Sequential(torch.nn.Linear(16, 16)), "tensor")
    >>> fp8.blame(model, torch.randn(4, 16), lambda y: y.square().mean()).rules
    ()
    """
    check_module("blame", model)
    check_number("threshold", threshold)
    if not threshold > 1:
        raise ValueError(f"threshold must be above 1, got {threshold}")
    replay = Replay(model, [batch], policy, loss, optimizer)
    if not replay.layers:
        raise ValueError(
            "blame: no layer of the model is converted: pass the policy it trains under, or "
            "convert it with fp8.convert"
        )
    return blamed(replay, partial(is_faulty, threshold=threshold))


def blamed(replay: Replay, is_faulty: Callable[[Step, Step], bool]) -> Blame:
    """The `Blame` of replays of converted layers. is_faulty: whether a replay has a fault that the
    one in high precision, which is finite, has not."""
    low = replay([])
    high = replay([LayerRule("*")])
    if not all(map(math.isfinite, high.judged)) or not is_faulty(low, high):
        return Blame(low, high, (), None, replay.count)
    rules = _at_fault(replay, lambda step: not is_faulty(step, high))
    return Blame(low, high, rules, replay(rules), replay.count)


def is_faulty(step: Step, high: Step, threshold: float = 2.0) -> bool:
    """Whether a step is not finite, or above ``threshold`` times that in high precision."""
    pairs = zip(step.judged, high.judged, strict=True)
    return any(
        not math.isfinite(x) or x > y + (threshold - 1) * abs(y) for x, y in pairs
    )


@dataclass(eq=False)
class Replay:
    """Replays steps under rules, on copies of the model and optimizer.

    Attributes:
        batches: one for each step. The result is that of the last one.
        begin: called before the first step of each replay.
        count: of the replays.
        layers: the name of each converted layer -> its recipe.
    """

    model: nn.Module
    batches: Sequence[Batch]
    policy: Policy | Recipe | str | None
    loss: Loss | None
    optimizer: Optimizer | None
    begin: Callable[[], None] = lambda: None
    count: int = 0

    def __post_init__(self) -> None:
        copied, *_ = self._copies()
        self.layers = {
            name: layer.fp8_recipe for name, layer in converted(copied).items()
        }

    def __call__(self, rules: Sequence[LayerRule]) -> Step:
        self.count += 1
        model, optimizer, loss = self._copies()
        rules_in_force = override(model, *rules) if rules else nullcontext()
        with seeded(None), torch.enable_grad(), quiet(), rules_in_force:
            self.begin()
            for batch in self.batches:
                step = _step(model, batch, loss, optimizer)
                if not math.isfinite(step.loss):
                    break
        return step

    def _copies(self) -> tuple[nn.Module, Optimizer | None, Loss | None]:
        model, optimizer, loss = training_copy(self.model, self.optimizer, self.loss)
        if self.policy is not None:
            with quiet():
                model = convert(model, self.policy)
        return model, optimizer, loss


def _step(
    model: nn.Module, batch: Batch, loss: Loss | None, optimizer: Optimizer | None
) -> Step:
    """Makes a step."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    value = loss_of(model, batch, loss)
    if not value.requires_grad:
        raise ValueError(
            "blame: the loss does not depend on a parameter that is trained"
        )
    model.zero_grad()
    if isinstance(loss, nn.Module):
        loss.zero_grad()
    value.backward()
    grads = [p.grad.detach().float() for p in parameters if p.grad is not None]
    norm = torch.stack([torch.linalg.vector_norm(g) for g in grads]).norm()
    after = None
    if optimizer is not None:
        optimizer.step()
        # With gradients, by which a loss is found in an output.
        after = float(loss_of(model, batch, loss).detach())
    return Step(float(value.detach()), float(norm), after)


class _Part(NamedTuple):
    """Casts of a layer, as indices in CASTS, that may be in high precision alone."""

    layer: str
    casts: frozenset[int]


def _at_fault(
    replay: Replay, is_repaired: Callable[[Step], bool]
) -> tuple[LayerRule, ...]:
    """Rules for the casts at fault: of layers, then of products, then of operands."""

    @cache
    def repaired_by(rules: tuple[LayerRule, ...]) -> bool:
        return is_repaired(replay(rules))

    def smallest(parts: Sequence[_Part]) -> list[_Part] | None:
        return _smallest(parts, lambda chosen: repaired_by(_joined(chosen)))

    every = frozenset(range(len(CASTS)))
    parts = smallest([_Part(name, every) for name in replay.layers])
    if parts is None:
        return (LayerRule("*"),)
    products = [frozenset(LayerRule("*", product=name).casts) for name in PRODUCTS]
    for pieces in (products, [frozenset([cast]) for cast in every]):
        split = [part for whole in parts for part in _split(replay, whole, pieces)]
        parts = smallest(split) or parts
    return _joined(parts)


def _split(
    replay: Replay, whole: _Part, pieces: Iterable[frozenset[int]]
) -> list[_Part]:
    """The fewest casts, for each of ``pieces`` in a part, that include it and may be in high
    precision alone: both operands of a product that are rotated alike, both casts of an operand
    with a history. Small ones first, which `_smallest` prefers."""
    recipe = replay.layers[whole.layer]
    casts = sorted(whole.casts)
    sets = [
        frozenset(some)
        for n in range(len(casts))
        for some in combinations(casts, n + 1)
    ]
    allowed = [some for some in sets if _composes(recipe, some)]
    found = set()
    for piece in pieces:
        holding = (some for some in allowed if piece <= some)
        found.add(next(holding, whole.casts))
    return [
        _Part(whole.layer, some)
        for some in sorted(found, key=lambda some: (len(some), *some))
    ]


def _composes(recipe: Recipe, high: frozenset[int]) -> bool:
    recipes: list[Recipe | None] = [recipe] * len(CASTS)
    for cast in high:
        recipes[cast] = None
    try:
        composed(tuple(recipes), recipe)
    except ValueError:
        return False
    return True


def _smallest(
    parts: Sequence[T], repairs: Callable[[Sequence[T]], bool]
) -> list[T] | None:
    """A smallest list of parts that repairs, where more parts never repair less; None if all of
    them do not. The last part of the shortest prefix that repairs, beside those known to be needed,
    is needed too."""
    rest = list(parts)
    needed = list[T]()
    if not repairs(rest):
        return None
    while rest and not (needed and repairs(needed)):
        counts = range(1, len(rest))  # all of them do
        count = 1 + bisect_left(
            counts, True, key=lambda n: repairs([*rest[:n], *needed])
        )
        needed.insert(0, rest[count - 1])
        del rest[count - 1 :]
    return needed


def _joined(parts: Iterable[_Part]) -> tuple[LayerRule, ...]:
    """The casts of parts in few rules: an operand in both of its products, all of a product."""
    of_layer: dict[str, set[int]] = {}
    for part in parts:
        of_layer.setdefault(part.layer, set()).update(part.casts)
    joined = []
    for layer, casts in of_layer.items():
        for concern in (None, *OPERANDS, *PRODUCTS, *CASTS):
            rule = LayerRule(layer or "*", product=concern)
            if casts and casts.issuperset(rule.casts):
                joined.append(rule)
                casts.difference_update(rule.casts)
    return tuple(joined)
