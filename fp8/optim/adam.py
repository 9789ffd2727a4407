"""`Adam` and `AdamW` with states in 8 or 16 bits: settings, all-or-nothing steps, state_dicts.

A state without a scale has the name that torch uses (``exp_avg``, ``exp_avg_sq``). One with a scale
consists of ``exp_avg_values``, ``exp_avg_scale`` (0-dim, or one for each block of 128) and, with a
single scale, ``exp_avg_amax``. A master weight is stored as ``master`` in the same way.

Bound of a step. For gradients of any size, the moments of exact Adam satisfy

    |m| / sqrt(v) <= (1 - b1) / sqrt((1 - b2) (1 - b1^2 / b2)),

by the Cauchy-Schwarz inequality: 7.3 for the default betas. A moment rounded to nearest has a
relative error of at most u = 2**-(mantissa bits + 1), and small moments are rounded in the safe
direction (see `fp8.optim.encodings`). The same bound then holds with b1 (1 + u) and b2 (1 - u) in
the inner fraction: 10.9 with "e4m3" and "float16", 1.5 times as large. (A second moment below the
smallest normal value can only be too large.) Moments rounded stochastically are unbiased instead.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from ..casts.scaled_tensor import DTYPES
from ..common.dtensor import is_dtensor, part_of
from ..common.step import parameters_of
from ..common.validation import check_flag, check_name, check_number
from ..formats.format import dtype_name
from ..warnings import OptimizerWarning, warn_once
from . import state as states
from .encodings import ENCODINGS, MASTERS, MOMENTS, WIDE
from .state import MASTER, Group, State
from .step import LARGEST, Unit, how_of, step_as_torch, update

KEPT = (*MOMENTS, "master_weights", "stochastic_weights", "min_size", "compile")
"""The settings that load_state_dict does not change."""

OPTIONAL = {*KEPT, "skipped_steps", "seed", "maximize", "differentiable"}
"""The settings that a saved group may lack."""


class LowPrecision(Optimizer):
    """Base class of `Adam` and `AdamW`, which isinstance tells apart."""

    decoupled: ClassVar[bool]
    default_decay: ClassVar[float]

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
        # FP8-LM's (arXiv:2310.18313, section 2.2).
        first_moment: str = "e4m3",
        second_moment: str = "float16",
        master_weights: str | None = None,
        stochastic_weights: bool = False,
        min_size: int = 4096,  # as min_8bit_size of bitsandbytes
        seed: int = 0,
        compile: bool = False,
    ) -> None:
        _refuse(
            amsgrad=amsgrad,
            foreach=foreach,
            fused=fused,
            capturable=capturable,
            differentiable=differentiable,
        )
        if weight_decay is None:
            weight_decay = self.default_decay
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
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

    def add_param_group(self, param_group: Group) -> None:
        """Adds a parameter group, as in torch.optim.

        Raises ValueError or TypeError for invalid settings.
        """
        super().add_param_group(param_group)
        try:
            check_group(self.param_groups[-1])
        except (TypeError, ValueError):
            del self.param_groups[-1]
            raise

    def __getstate__(self) -> State:
        """The state for copies and pickle."""
        state = super().__getstate__()
        readable: dict[Tensor, State] = defaultdict(dict)
        for parameter, entry in state["state"].items():
            readable[parameter] = {k: _readable(v) for k, v in entry.items()}
        return {**state, "state": readable}

    @property
    def skipped_steps(self) -> int:
        """The number of steps skipped because a gradient was not finite."""
        return int(self.param_groups[0]["skipped_steps"])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates all parameters that have a gradient, or none; returns the closure's loss.

        A parameter may be any tensor that supports ``p.detach().to(torch.float32)`` and
        ``p.copy_(float32)``, and its gradient any that supports ``.to(torch.float32)``. If a
        parameter with a master was written since the last step, its master is set from it. Raises
        RuntimeError for a sparse gradient.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for parameter in parameters_of(self):
            grad = parameter.grad
            if grad is not None and grad.layout != torch.strided:
                raise RuntimeError(
                    f"{type(self).__name__} needs dense gradients, got {grad.layout}"
                )
            # Each process steps its part, for which a gradient may have partial sums.
            if is_dtensor(grad) and grad.placements != parameter.placements:
                parameter.grad = grad.detach().redistribute(
                    placements=parameter.placements
                )
        self._refresh_masters()
        if not self._step_all():
            for group in self.param_groups:
                group["skipped_steps"] += 1
        return loss

    def _refresh_masters(self) -> None:
        """Sets the masters of weights that were written from them."""
        weights = [
            p for p in parameters_of(self) if states.has(self.state.get(p, {}), MASTER)
        ]
        written = _values([states.was_written(self.state[p], p) for p in weights])
        for p in itertools.compress(weights, written):
            state = self.state[p]
            encoding = ENCODINGS[dtype_name(states.read(state, MASTER).values.dtype)]
            states.keep(state, MASTER, p, encoding, states.numbers_of(p).flatten())

    def _step_all(self) -> bool:
        """Updates all parameters that have a gradient, or none: False, if one is not finite."""
        units = self._units()
        asked = any(group["stochastic_weights"] for group in self.param_groups)
        rounds = any(u.how.stochastic[0] or u.rounds_copies() for u in units)
        if units and asked and not rounds:
            warn_once(OptimizerWarning, _NOTHING_ROUNDED, about=self)
        looks: list[Tensor] = []
        for grad in map(Unit.gradient, units):
            if not len(grad):  # a shard may be empty
                grad = grad.new_zeros(1)
            looks += torch.aminmax(grad)
        wide = [part_of(p.grad) for p in parameters_of(self) if _is_wide(p)]
        # Not their largest magnitudes, which may be more than float32 represents.
        looks += [torch.where(g.isfinite().all(), 0.0, math.nan) for g in wide]
        for unit in units:
            looks += unit.amaxes().values()
        numbers = iter(_values(looks))
        largest = [max(-next(numbers), next(numbers)) for _ in units]  # NaN propagates
        looked = [*largest, *itertools.islice(numbers, len(wide))]
        are_finite = all(x < math.inf for x in looked)
        if not states.everywhere(are_finite, parameters_of(self)):
            return False
        for unit, x in zip(units, largest, strict=True):
            for state in unit.states:
                state["step"] += 1
            update(unit, x, unit.scales(min(x, LARGEST), numbers))
        for group in self.param_groups:
            parameters = [p for p in group["params"] if _is_wide(p)]
            of_each = [self.state[p] for p in parameters]
            for parameter, state in zip(parameters, of_each, strict=True):
                states.prepare(state, parameter, group)
            step_as_torch(group, self.decoupled, parameters, of_each)
        return True

    def _units(self) -> list[Unit]:
        units: dict[object, Unit] = {}
        every = [(group, p) for group in self.param_groups for p in group["params"]]
        for index, (group, parameter) in enumerate(every):
            if parameter.grad is None or _is_wide(parameter):
                continue
            state = self.state[parameter]
            stored_as = states.prepare(state, parameter, group)
            key: object = index
            if parameter.numel() < group["min_size"]:
                # What shares one call of the arithmetic has one dtype, device and step.
                kind = type(part_of(parameter)), parameter.dtype, parameter.device
                key = (id(group), *kind, float(state["step"]), MASTER in stored_as)
            if key not in units:
                how = how_of(parameter, stored_as, group)
                units[key] = Unit(group, self.decoupled, index, how)
            units[key].parameters.append(parameter)
            units[key].states.append(state)
        return list(units.values())

    def state_dict(self) -> State:
        """Returns the state, as in torch.optim.

        The moments of a DTensor are saved as DTensors in float32 without scales, because scales
        belong to one process. `load_state_dict` rounds them again.
        """
        saved = super().state_dict()
        entries = dict(saved["state"])
        parameters = parameters_of(self)
        for i, entry in entries.items():
            if is_dtensor(parameters[i]):
                entries[i] = states.portable(parameters[i], entry)
        return {**saved, "state": entries}

    def load_state_dict(self, state_dict: State) -> None:
        """Loads a state_dict of Adam from torch or from this package.

        The state is converted to the encodings of this optimizer: exactly if they are the same,
        else rounded to nearest. A saved master without a counterpart here is written to its
        parameter. Raises ValueError, without changing anything, for amsgrad states, states of
        another kind of optimizer, shapes that do not match, settings out of range, missing entries,
        moments that are not finite, negative second moments and an invalid step count.
        """
        groups = self.param_groups
        state = self.state
        hold = self.register_load_state_dict_pre_hook(_hold)
        # Ahead of the user's hooks, which see the converted state.
        release = self.register_load_state_dict_post_hook(
            partial(_place, groups), prepend=True
        )
        try:
            super().load_state_dict(state_dict)
        except BaseException:
            # torch has replaced groups and states before it calls `_place`.
            self.__setstate__({"state": state, "param_groups": groups})
            raise
        finally:
            hold.remove()
            release.remove()


_NOTHING_ROUNDED = (
    "stochastic_weights=True rounds no weight of this optimizer, because all are float32 or wider, "
    "or have float32 masters. It is for bfloat16 and float16 weights, ScaledTensors and float16 "
    "masters"
)


class Adam(LowPrecision):
    """`AdamW` with weight_decay, 0 by default, added to the gradient, as in `torch.optim.Adam`."""

    decoupled = False
    default_decay = 0.0


class AdamW(LowPrecision):
    """`torch.optim.AdamW` (decoupled weight decay) with states in low precision.

    The arguments of torch keep their positions, names and defaults. The arithmetic is float32. All
    options may differ between parameter groups. Parameters in float64, complex64 and complex128 are
    stepped as `torch.optim` does, to the bit, with states in their dtype.

    If any gradient is not finite, no parameter and no state changes, and ``skipped_steps`` counts
    the step. Deciding this synchronizes with a GPU. A finite element above 2**63 counts as that.

    Args:
        params: parameters, named parameters or groups of them; float32, bfloat16 or float16, or
            tensor subclasses of these dtypes (`fp8.ScaledTensor`); float64 and complex.
        first_moment, second_moment: names in `MOMENTS`, of `ENCODINGS`. Bytes per element:
            "float32" 4; "bfloat16" 2; "float16" 2 and "e4m3" 1, both with one scale per tensor;
            "e4m3_block" and "e5m3_block" 1.03, with a scale for each block of 128.
        master_weights: "float32" or "float16" (with one scale per tensor): the copy that is updated
            for weights that are not float32. After a step the weights are rounded from it.
        stochastic_weights: rounds weights of 16 bits or fewer (bfloat16, float16, ScaledTensors) or
            their float16 masters stochastically, so that updates below their precision take effect
            in expectation. A warning says if there are none.
        min_size: parameters of fewer elements have float32 moments and are updated together.
        seed: the seed of the random bits, which depend on it, the step and the position of the
            element: the same in eager and compiled code, and after resuming from a state_dict.
        compile: compiles the update of large parameters with `torch.compile`.

    Raises:
        ValueError: for values out of range, and if amsgrad, foreach, fused, capturable or
            differentiable is True.
        TypeError: for another dtype.
    """

    decoupled = True
    default_decay = 1e-2


def check_group(group: Group) -> None:
    """Raises ValueError or TypeError for invalid settings of a group, and parameters of a dtype
    that cannot be stepped."""
    for name, allowed in {**MOMENTS, "master_weights": (None, *MASTERS)}.items():
        check_name(name, group[name], allowed)
    check_flag("stochastic_weights", group["stochastic_weights"])
    for name in ("lr", "eps", "weight_decay", "min_size"):
        check_number(name, group[name])
        if not 0 <= group[name] < math.inf:
            raise ValueError(
                f"{name} must be finite and not negative, got {group[name]}"
            )
    if not isinstance(group["seed"], int):
        raise TypeError(f"seed is an int, got {group['seed']!r}")
    for parameter in group["params"]:
        if parameter.dtype not in (*DTYPES, *WIDE):
            listed = ", ".join(map(dtype_name, (*DTYPES, *WIDE)))
            raise TypeError(
                f"cannot step a parameter of {parameter.dtype}; allowed are {listed}"
            )
    betas = group["betas"]
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise TypeError(f"betas are two numbers, got {betas!r}")
    for i, beta in enumerate(betas):
        check_number(f"betas[{i}]", beta)
    if not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas must be at least 0 and less than 1, got {betas}")


def _is_wide(parameter: Tensor) -> bool:
    """Whether it has a gradient, and torch's function steps it: complex and float64 ones."""
    return parameter.grad is not None and parameter.dtype in WIDE


def _refuse(**options: bool | None) -> None:
    for name, value in options.items():
        if value not in (None, False):
            raise ValueError(
                f"{name}={value!r} is not supported in low precision: leave it out, or pass False; "
                "torch.optim has it"
            )


@dataclass(frozen=True)
class _Bits:
    """A tensor of an 8-bit format, as bytes: pickle fails on their storage (torch 2.13:
    "UntypedStorage has no attribute dtype")."""

    tensor: Tensor

    def __reduce__(self) -> tuple[object, ...]:
        return Tensor.view, (self.tensor.view(torch.uint8), self.tensor.dtype)


def _readable(value: Tensor) -> Tensor | _Bits:
    if type(value) is Tensor and value.is_floating_point() and value.itemsize == 1:
        return _Bits(value)
    return value


def _values(scalars: list[Tensor]) -> list[float]:
    """The values of 0-dim tensors, with one synchronization with a GPU."""
    if not scalars:
        return []
    here = scalars[0].device
    return torch.stack([x.float().to(here) for x in scalars]).tolist()


def _hold(optimizer: Optimizer, state_dict: State) -> State:
    """Wraps each state: torch casts tensors that it sees to the dtype of the parameter."""
    held = {k: SimpleNamespace(state=v) for k, v in state_dict["state"].items()}
    return {**state_dict, "state": held}


def _place(before: list[Group], optimizer: Optimizer) -> None:
    for group, old in zip(optimizer.param_groups, before, strict=True):
        if group.get("amsgrad"):
            raise ValueError("the state is of amsgrad=True, which is not supported")
        missing = sorted(optimizer.defaults.keys() - group.keys() - OPTIONAL)
        # A state of torch.optim lacks the settings of low precision.
        group.update({**old, **group, **{name: old[name] for name in KEPT}})
        for parameter in group["params"]:
            if parameter in optimizer.state:
                held = optimizer.state[parameter].state
                optimizer.state[parameter] = states.convert(parameter, held, group)
        if missing:
            raise ValueError(f"a group of the state has no {', '.join(missing)}")
        check_group(group)
