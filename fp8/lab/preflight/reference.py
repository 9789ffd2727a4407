"""What is checked and read of a model before it trains: that it is in high precision, and its
products."""

from __future__ import annotations

import copy

import torch
from torch import nn

from ...common.step import Batch, call, copied, loss_value, scalars, untouched
from ...selection.layers import candidates
from ...selection.roles import roles
from ...surgery.convert import convert, report
from ..hardware import Product
from ..stats import stats
from ..trace import trace
from .training import Problem
from .update_error import quiet


def check_reference(problem: Problem) -> list[str]:
    """Raises ValueError if a step of the model casts operands: the candidates are compared with it.
    Returns notes: that its output has several losses, of which the runs minimize one."""
    model, loss = copy.deepcopy(problem.setup.model).train(), problem.setup.loss
    trained = [p for p in model.parameters() if p.requires_grad]
    if any(torch.is_autocast_enabled(kind) for kind in {p.device.type for p in trained}):
        raise ValueError(
            "preflight was called inside torch.autocast, which reuses its copies of weights "
            "until the block ends: enter it in the forward of the model"
        )
    casts = stats(model, every=1)
    with untouched(model), torch.enable_grad(), quiet(), casts:
        output = call(model, copied(problem.batch))
        value = loss_value(output, loss)
        if value is not None and value.requires_grad and trained:
            torch.autograd.grad(value, trained, allow_unused=True)
    if rows := casts.rows():
        listed = ", ".join(f"the {r.operand} of {r.layer} to {r.format}" for r in rows[:3])
        raise ValueError(
            f"the reference is in low precision already: it casts {listed}"
            f"{', ...' if len(rows) > 3 else ''}. Pass the model without simulate_fp8, and "
            "call preflight outside of fp8.autocast"
        )
    if loss is None and len(losses := scalars(output)) > 1:
        return [
            f"the output has {len(losses)} scalars that require a gradient and none named loss: "
            "the first alone is minimized; loss= computes another one from the output"
        ]
    return []


def left_alone(model: nn.Module) -> dict[str, str]:
    """Layer -> why `fp8.convert` does not cast it."""
    with quiet():
        rows = report(convert(copy.deepcopy(model), "tensor", backend="simulate"))
    return {row.path or "(model)": row.why for row in rows.left_alone}


def products_of(model: nn.Module, batch: Batch) -> list[Product]:
    """The products of a model, with the roles of their layers and why some are not cast."""
    named = roles(model, candidates(model))
    return trace(model, batch, roles=named, why_not=left_alone(model))
