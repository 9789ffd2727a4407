"""The update error: what the casts of a policy do to an optimizer's step, without training.

At the same weights and batch let g be the gradient of the model in its own precision, g_q the
gradient under a policy, and v the second moment of Adam. The update error is

    ||(g_q - g) / sqrt(v)|| / ||g / sqrt(v)||

over all parameters that the optimizer steps: the relative error in the metric in which Adam takes
its step. v contains the present gradient with the weight 1 - beta2: a cast that makes a gradient
nonzero that has been zero so far costs one bounded step, not an infinite one.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...casts.counts import CastRecorder, Observed, stride
from ...common.step import Loss, untouched
from ...recipes.policy import Policy
from ...recipes.recipe import Recipe
from ...surgery.convert import convert, revert_layers
from ...warnings import PitfallWarning, strict
from ..stats import Stats, StatsRow
from .findings import OperandRange
from .training import Snapshot, loss_of

EPSILON = 1e-8
"""Added to sqrt(v): Adam's epsilon."""


class UpdateError(NamedTuple):
    """error: the update error. slope: <g_q, g> / <g, g> in the same metric; below 1, updates
    shrink."""

    error: float
    slope: float


@contextmanager
def quiet() -> Iterator[None]:
    """Within the block, policies that a user would be warned of are tried without a warning."""
    with strict(False), warnings.catch_warnings():
        warnings.simplefilter("ignore", PitfallWarning)
        yield


class Probe:
    """Measures update errors at one snapshot, on a copy of the model. All passes draw the same
    random numbers (dropout, stochastic rounding). Raises ValueError if the gradient is zero or not
    finite."""

    def __init__(self, model: nn.Module, snapshot: Snapshot, loss: Loss | None) -> None:
        self.step = snapshot.step
        self.batch = snapshot.batch
        self._loss = loss
        self.model = copy.deepcopy(model)
        self.model.load_state_dict(snapshot.weights)
        self.model.train()
        names = {id(p): name for name, p in self.model.named_parameters()}
        self._leaves = [
            p
            for p in self.model.parameters()
            if p.requires_grad and (snapshot.trained is None or names[id(p)] in snapshot.trained)
        ]
        self._moments = [snapshot.second_moments.get(names[id(p)]) for p in self._leaves]
        self._new = 1 - snapshot.beta2
        self._reference = self._gradients()
        self._complete(snapshot.seen)
        self._steps = [
            self._divided(g, g, v) for g, v in zip(self._reference, self._moments, strict=True)
        ]
        self._norm = sum(float(step.square().sum(dtype=torch.float64)) for step in self._steps)
        if not self._norm or not math.isfinite(self._norm):
            what = "zero" if self._norm == 0 else "not finite"
            raise ValueError(f"the gradient of the reference at step {self.step} is {what}")

    def __call__(self, policy: Policy | Recipe | str) -> UpdateError:
        """The update error of a policy; (inf, nan) if its gradient is not finite."""
        with self._converted(policy):
            gradients = self._gradients()
        noise = inner = 0.0
        rows = zip(gradients, self._reference, self._steps, self._moments, strict=True)
        for q, g, step, v in rows:
            larger = torch.maximum(q.abs(), g.abs())
            noise += float(self._divided(q - g, larger, v).square().sum(dtype=torch.float64))
            inner += float((self._divided(q, g, v).double() * step.double()).sum())
        if not math.isfinite(noise):
            return UpdateError(math.inf, math.nan)
        return UpdateError(math.sqrt(noise / self._norm), inner / self._norm)

    @property
    def in_steps(self) -> bool:
        """Whether errors are in units of the optimizer's step; else in those of the gradient."""
        return any(moment is not None for moment in self._moments)

    def _complete(self, seen: float) -> None:
        """Where only some parameters have a second moment (Muon, factored moments), the mean square
        of the gradient takes the place of the others'."""
        if self.in_steps:
            self._moments = [
                seen * gradient.square().mean() if moment is None else moment
                for gradient, moment in zip(self._reference, self._moments, strict=True)
            ]

    def _divided(self, x: Tensor, gradient: Tensor, before: Tensor | None) -> Tensor:
        """``x`` divided by the root of the second moment ``before``, updated with ``gradient``."""
        if before is None:
            return x
        return x / (before + self._new * gradient.square()).sqrt_().add_(EPSILON)

    def ranges(self, recipe: Recipe) -> list[OperandRange]:
        """The magnitudes of all operands, and what the casts of the recipe lose of them."""
        recorder = _RangeRecorder(self.model)
        seen = Stats(recorder)
        with self._converted(recipe), seen:
            self._gradients()
        return [recorder.row(row, recipe) for row in seen.rows()]

    @contextmanager
    def _converted(self, policy: Policy | Recipe | str) -> Iterator[None]:
        with quiet():
            convert(self.model, policy, backend="simulate")
            try:
                yield
            finally:
                revert_layers(self.model)

    def _gradients(self) -> list[Tensor]:
        """The gradients of all parameters; zero for those without one."""
        with untouched(self.model, seed=0), torch.enable_grad():
            loss = loss_of(self.model, self.batch, self._loss)
            gradients = torch.autograd.grad(loss, self._leaves, allow_unused=True)
        return [
            torch.zeros_like(p) if g is None else g.detach().float()
            for g, p in zip(gradients, self._leaves, strict=True)
        ]


class _RangeRecorder(CastRecorder):
    """Also counts the sampled elements of each operand, divided by their scale, by binade."""

    SAMPLE = 1 << 14

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, self.SAMPLE)
        self._binades: dict[tuple[str, str, str], Counter[int]] = {}

    def count(self, layer: str, operand: str, seen: Observed) -> None:
        super().count(layer, operand, seen)
        step = stride(seen.x, self.sample)
        xs = seen.x.detach().flatten()[::step].float()
        if seen.scale is not None:
            scale = seen.scale.float()
            xs = xs / (scale if scale.dim() == 0 else scale.flatten()[::step])
        xs = xs[xs.isfinite() & (xs != 0)]
        exponents = (torch.frexp(xs).exponent - 1).tolist()
        key = (layer, operand, str(seen.format))
        self._binades.setdefault(key, Counter()).update(exponents)

    def row(self, seen: StatsRow, recipe: Recipe) -> OperandRange:
        """What `Stats` has of an operand, and its binades."""
        binades = self._binades[seen.layer, seen.operand, seen.format]
        low, high = (min(binades), max(binades)) if binades else (0, -1)
        return OperandRange(
            layer=seen.layer,
            operand=seen.operand,
            recipe=recipe.name,
            format=seen.format,
            lowest=low,
            counts=[binades[e] for e in range(low, high + 1)],
            zero=seen.zero,
            saturated=seen.saturated,
            sqnr=seen.sqnr if math.isfinite(seen.sqnr) else None,
        )
