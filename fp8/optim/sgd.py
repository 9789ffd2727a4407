"""`SGD` for weights and gradients in low precision."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from torch.optim.sgd import sgd

from ..common.dtensor import part_of
from ..common.validation import check_number
from ..tensors.scaled_tensor import dequantized, store
from .base import LowPrecision, check_group, refuse
from .encodings import decode
from .state import MASTER, MOMENTUM, Group, State, everywhere, keep, parameters_of, prepare, read


class SGD(LowPrecision):
    """`torch.optim.SGD` with updates and momentum in float32, for parameters in low precision.

    The arguments of torch keep their positions, names and defaults. Gradients that are not finite
    are handled as in `fp8.optim.AdamW`.

    Args:
        params, master_weights: as in `fp8.optim.AdamW`.
        lr, momentum, dampening, weight_decay, nesterov, maximize: as in `torch.optim.SGD`.
        foreach, differentiable, fused: not supported; None or False.

    Raises:
        ValueError: for values out of range, and if foreach, fused or differentiable is True.
        TypeError: for a dtype other than float32, bfloat16 and float16.
    """

    options = ("master_weights",)

    @staticmethod
    def check(group: Group) -> None:
        check_group(group, "lr", "momentum", "weight_decay")
        check_number("dampening", group["dampening"])
        if group["nesterov"] and (group["momentum"] == 0 or group["dampening"] != 0):
            raise ValueError("nesterov needs a momentum, and no dampening")

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        master_weights: str | None = None,
    ) -> None:
        refuse(foreach=foreach, differentiable=differentiable, fused=fused)
        defaults = {"lr": lr, "momentum": momentum, "dampening": dampening, "nesterov": nesterov}
        defaults |= {"weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults | {"master_weights": master_weights, "skipped_steps": 0})

    def step_all(self) -> bool:
        trained = [
            (p, group) for group in self.param_groups for p in group["params"] if p.grad is not None
        ]
        finite = [dequantized(part_of(p.grad)).isfinite().all().cpu() for p, _ in trained]
        if not everywhere(all(map(bool, finite)), parameters_of(self)):
            return False
        for parameter, group in trained:
            _step(parameter, self.state[parameter], group)
        return True


def _step(parameter: Any, state: State, group: Group) -> None:
    master, here = prepare(state, parameter, group).get(MASTER), part_of(parameter)
    if master is None:
        weight = dequantized(here.detach(), torch.float32)
    else:
        weight = decode(read(state, MASTER)).view(here.shape)
    buffers = [state.get(MOMENTUM)]
    arguments = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize")
    gradient = dequantized(part_of(parameter.grad), torch.float32)
    sgd([weight], [gradient], buffers, foreach=False, **{k: group[k] for k in arguments})
    if buffers[0] is not None:
        state[MOMENTUM] = buffers[0]
    if master is not None:
        keep(state, MASTER, parameter, master, weight.flatten())
        weight = decode(read(state, MASTER)).view(here.shape)
    store(here, weight)
