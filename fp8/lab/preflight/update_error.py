"""The update error: what the casts of a policy do to an optimizer's step, without training.

With g the gradient of the model in its own precision, g_q that under a policy, and v the second
moment of Adam, it is ||(g_q - g) / sqrt(v)|| / ||g / sqrt(v)|| over all parameters that the
optimizer steps. v contains the present gradient with the weight 1 - beta2: a cast that makes a
gradient nonzero that has been zero so far costs one bounded step, not an infinite one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ...common.copies import training_copy
from ...common.step import call, copied, loss_value, scalars, untouched
from ...layers.convert import convert, revert_layers
from ...recipes.policy import Policy
from ...recipes.recipe import Recipe
from ..stats import stats
from ..trace import quiet
from .training import Problem, Snapshot, loss_of, modules_of

# Adam's.
EPSILON = 1e-8


class Probe:
    """Measures update errors at one snapshot, with the same random numbers in all passes. Raises
    ValueError if the gradient is zero or not finite."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.step = snapshot.step
        self.batch = snapshot.batch
        self.model = snapshot.model
        self._loss = snapshot.loss
        self._modules = modules_of(self.model, self._loss)
        self.model.train()
        self._leaves = {
            name: p
            for name, p in self.model.named_parameters()
            if p.requires_grad and name in snapshot.trained
        }
        self._moments = [snapshot.second_moments.get(name) for name in self._leaves]
        self._new = 1 - snapshot.beta2
        self._reference = self._gradients()
        if self.in_steps:
            # Parameters without a second moment beside others (Muon) have the mean square of their
            # gradient.
            for i, gradient in enumerate(self._reference):
                if self._moments[i] is None:
                    self._moments[i] = snapshot.seen * gradient.square().mean()
        pairs = zip(self._reference, self._moments, strict=True)
        self._norm = sum(self._squared(g, g, v) for g, v in pairs)
        if not self._norm or not math.isfinite(self._norm):
            what = "not finite" if self._norm else "zero"
            raise ValueError(
                f"the gradient of the reference at step {self.step} is {what}"
            )

    def __call__(self, policy: Policy | Recipe | str) -> float:
        """The update error of a policy; inf if its gradient is not finite."""
        with quiet():
            convert(self.model, policy, backend="simulate")
            try:
                gradients = self._gradients()
            finally:
                revert_layers(self.model)
        noise = 0.0
        for q, g, v in zip(gradients, self._reference, self._moments, strict=True):
            # v has the larger of both: a gradient that casts alone make nonzero counts as a step,
            # not as an infinite one.
            noise += self._squared(q - g, torch.maximum(q.abs(), g.abs()), v)
        if math.isfinite(noise):
            return math.sqrt(noise / self._norm)
        return math.inf

    def unmoved(self, model: nn.Module) -> list[str]:
        """The names of the parameters that were stepped and are as in ``model``."""
        before = dict(model.named_parameters())
        return [
            name for name, p in self._leaves.items() if torch.equal(p, before[name])
        ]

    @property
    def in_steps(self) -> bool:
        """Whether errors are in units of the optimizer's step; else they are in units of the
        gradient."""
        return any(moment is not None for moment in self._moments)

    def _squared(self, x: Tensor, gradient: Tensor, before: Tensor | None) -> float:
        """The squared norm of ``x`` / sqrt(v). before: v without ``gradient``."""
        if before is not None:
            x = x / (before + self._new * gradient.square()).sqrt_().add_(EPSILON)
        return float(x.square().sum(dtype=torch.float64))

    def _gradients(self) -> list[Tensor]:
        """The gradients of all parameters; zero for those without one."""
        with untouched(self._modules, seed=0), torch.enable_grad():
            loss = loss_of(self.model, self.batch, self._loss)
            leaves = list(self._leaves.values())
            gradients = torch.autograd.grad(loss, leaves, materialize_grads=True)
        return [gradient.float() for gradient in gradients]


def check_reference(problem: Problem) -> list[str]:
    """Raises ValueError if a step of the model casts operands: the candidates are compared with it.
    Returns a note if its output has several losses, of which the runs minimize one."""
    model, _, loss = training_copy(problem.setup.model, None, problem.setup.loss)
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    devices = {p.device.type for p in trained}
    if any(map(torch.is_autocast_enabled, devices)):
        raise ValueError(
            "preflight was called inside torch.autocast, which reuses its copies of weights "
            "until the block ends: enter it in the forward of the model"
        )
    casts = stats(model, every=1)
    with untouched(model), torch.enable_grad(), quiet(), casts:
        output = call(model, copied(problem.batch))
        value = loss_value(output, loss)
        if value is not None and value.requires_grad and trained:
            problem.check_apart(value)
            torch.autograd.grad(value, trained, allow_unused=True)
    if rows := casts.rows():
        listed = [f"the {r.operand} of {r.layer} to {r.format}" for r in rows[:3]]
        listed += ["..."] * (len(rows) > 3)
        raise ValueError(
            f"the reference is in low precision already: it casts {', '.join(listed)}. Pass the "
            "model without simulate_fp8, and call preflight outside of fp8.autocast"
        )
    losses = scalars(output)
    if loss is None and len(losses) > 1:
        return [
            f"the output has {len(losses)} scalars that require a gradient and none named loss: "
            "the first alone is minimized; loss= computes another one from the output"
        ]
    return []
