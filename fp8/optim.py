"""`Adam` and `AdamW` with states in 8 or 16 bits.

    optimizer = fp8.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)

The states are plain tensors in ``optimizer.state``. One kept as it is has the name that torch gives
it (``exp_avg``, ``exp_avg_sq``); one in units of a scale is ``exp_avg_values`` with
``exp_avg_scale`` (0-dim, or one for each block of 128) and, where that is one for all,
``exp_avg_amax``. A master weight is ``master`` in the same way.

How long a step can be. With |g| up to any size at any time, the moments of exact Adam give

    |m| / sqrt(v) <= (1 - b1) / sqrt((1 - b2) (1 - b1^2 / b2)),

by the inequality of Cauchy and Schwarz: 7.3 for the default betas. Rounded to nearest, a moment
that is stored has a relative error of up to u = 2**-(mantissa bits + 1), and rounding of small ones
goes the safe way (see `fp8.moments`), so that the same holds with b1 (1 + u) and b2 (1 - u) under
the inner fraction: 10.9 with "e4m3" and "float16", 1.5 times as much. (A second moment below the
smallest normal value is only ever too large.) Rounded stochastically, as `fp8.moments` says when,
moments are right in the mean instead: first ones are not larger, second ones not smaller.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from .adam import PLAIN, step_units, units_of
from .formats import dtype_name
from .moments import MASTERS, MOMENTS
from .names import check_flag, check_name, check_number
from .optim_base import LowPrecision, refuse
from .optim_state import FIRST, MASTER, SECOND, convert, local, parameters_of
from .sgd import MOMENTUM, SGD

__all__ = ["SGD", "Adam", "AdamW", "state_bytes"]


def _check(group: dict[str, Any]) -> None:
    """Raises ValueError and TypeError for what a group cannot have."""
    choices: dict[str, tuple[str | None, ...]] = {**MOMENTS, "master_weights": (None, *MASTERS)}
    for name, allowed in choices.items():
        check_name(name, group[name], allowed)
    check_flag("stochastic_weights", group["stochastic_weights"])
    for field in ("lr", "eps", "weight_decay", "min_size"):
        check_number(field, group[field])
        if not 0 <= group[field] < math.inf:
            raise ValueError(f"{field} must be finite and not negative, got {group[field]}")
    betas = group["betas"]
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise TypeError(f"betas are two numbers, got {betas!r}")
    for i, beta in enumerate(betas):
        check_number(f"betas[{i}]", beta)
    if not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas must be at least 0 and less than 1, got {betas}")
    if not isinstance(group["seed"], int):
        raise TypeError(f"seed is an int, got {group['seed']!r}")
    for parameter in group["params"]:
        if parameter.dtype not in PLAIN:
            listed = ", ".join(map(dtype_name, PLAIN))
            raise TypeError(f"cannot step a parameter of {parameter.dtype}; allowed are {listed}")


class _Adam(LowPrecision):
    """What `Adam` and `AdamW` share. Neither is a subclass of the other, so that no test for one of
    them takes the other for it."""

    options = (
        "first_moment",
        "second_moment",
        "master_weights",
        "stochastic_weights",
        "min_size",
        "compile",
    )
    check = staticmethod(_check)
    converted = staticmethod(convert)

    decoupled: bool
    default_decay: float

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float | None = None,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        first_moment: str = "e4m3",
        second_moment: str = "float16",
        master_weights: str | None = None,
        stochastic_weights: bool = False,
        min_size: int = 4096,
        seed: int = 0,
        compile: bool = False,
    ) -> None:
        refuse(amsgrad=amsgrad, foreach=foreach, fused=fused)
        refuse(capturable=capturable, differentiable=differentiable)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": self.default_decay if weight_decay is None else weight_decay,
            "maximize": maximize,
            "first_moment": first_moment,
            "second_moment": second_moment,
            "master_weights": master_weights,
            "stochastic_weights": stochastic_weights,
            "min_size": min_size,
            "seed": seed,
            "compile": compile,
            "skipped_steps": 0,
        }
        super().__init__(params, defaults)

    def step_all(self) -> bool:
        index, units = 0, []
        for group in self.param_groups:
            units += units_of(group, self.state, index, self.decoupled)
            index += len(group["params"])
        return step_units(units, parameters_of(self))


class Adam(_Adam):
    """`torch.optim.Adam`: weight_decay is added to the gradient (L2). Arguments as in `AdamW`."""

    decoupled = False
    default_decay = 0.0


class AdamW(_Adam):
    """`torch.optim.AdamW`, decay decoupled from the gradient, with states in low precision.

    Positions, names and defaults of torch's arguments are torch's. The arithmetic is float32.

    params: parameters, named parameters or groups of them; float32, bfloat16 or float16, or tensors
    of another class that stand for these (`fp8.scaled_tensor.ScaledTensor`).
    first_moment, second_moment: names in `MOMENTS`, of `ENCODINGS`. Bytes an element: "float32" 4;
    "bfloat16" 2; "float16" 2, in units of one scale for the tensor; "e4m3" 1, so too; "e4m3_block"
    and "e5m3_block" 1.03, with a scale for each block of 128.
    master_weights: "float32" or "float16" (in units of one scale): the copy that is stepped of
    weights that are not float32 themselves; after a step they are rounded from it.
    stochastic_weights: round weights, or masters, that are bfloat16 or float16 to one of their two
    neighbours, so that steps too small for their precision are taken in the mean.
    min_size: parameters of fewer elements keep float32 moments, and are stepped together.
    seed: of the random bits, which follow from it, the step and the position of an element: the
    same eager and compiled, and in a run continued from a state_dict.
    compile: compile the step of large parameters with `torch.compile`. Otherwise it goes through
    them piece by piece in a processor's cache.

    All may differ between groups, as the learning rate may. A gradient that is not finite, or
    whose square is not, in any of the groups: no parameter is stepped and no state changes, and
    ``skipped_steps`` counts it. One look at all gradients finds out; on a GPU the host waits for
    it.

    Raises ValueError for values out of range and where amsgrad, foreach, fused, capturable or
    differentiable is True, TypeError for another dtype.

    >>> weight = torch.nn.Parameter(torch.ones(128, 128))
    >>> optimizer = AdamW([weight], lr=0.1, first_moment="e4m3_block", second_moment="e5m3_block")
    >>> weight.square().sum().backward()
    >>> _ = optimizer.step()
    >>> optimizer.state[weight]["exp_avg_values"].dtype
    torch.float8_e4m3fn
    >>> state_bytes(optimizer)
    {'first_moment': 16896, 'second_moment': 16896, 'master': 0, 'step': 4}
    """

    decoupled = True
    default_decay = 1e-2


def state_bytes(optimizer: Optimizer) -> dict[str, int]:
    """Bytes of the tensors that an optimizer of this module keeps, by what they are for."""
    kinds = {SECOND: "second_moment", FIRST: "first_moment", MASTER: "master", "step": "step"}
    kinds[MOMENTUM] = "first_moment"
    found = dict.fromkeys(("first_moment", "second_moment", "master", "step"), 0)
    for state in optimizer.state.values():
        for key, value in state.items():
            kind = next(kind for name, kind in kinds.items() if key.startswith(name))
            found[kind] += local(value).nbytes
    return found
