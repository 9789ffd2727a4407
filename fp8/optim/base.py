"""Base class of the optimizers: all-or-nothing steps, loading of states in any encoding, and
masters that follow external changes of their weights."""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from ..common.dtensor import is_dtensor, part_of
from ..common.validation import check_name, check_number
from ..formats.format import dtype_name
from ..tensors.scaled_tensor import DTYPES
from . import state as states
from .encodings import ENCODINGS, MASTERS, decode
from .state import MASTER, Group, parameters_of


def refuse(**options: bool | None) -> None:
    """Raises ValueError for enabled options of torch's optimizers that are not supported."""
    for name, value in options.items():
        if value not in (None, False):
            raise ValueError(
                f"{name}={value!r} is not supported in low precision: leave it out, or pass False; "
                "torch.optim has it"
            )


def check_group(group: dict[str, Any], *fields: str) -> None:
    """Raises ValueError or TypeError unless these settings are finite, not negative numbers, and
    the masters, the seed and the dtypes of the parameters are possible."""
    check_name("master_weights", group["master_weights"], (None, *MASTERS))
    for field in fields:
        check_number(field, group[field])
        if not 0 <= group[field] < math.inf:
            raise ValueError(f"{field} must be finite and not negative, got {group[field]}")
    if not isinstance(group.get("seed", 0), int):
        raise TypeError(f"seed is an int, got {group['seed']!r}")
    for parameter in group["params"]:
        if parameter.dtype not in DTYPES:
            listed = ", ".join(map(dtype_name, DTYPES))
            raise TypeError(f"cannot step a parameter of {parameter.dtype}; allowed are {listed}")


class LowPrecision(Optimizer):
    """Base class. Subclasses check a group and update the parameters."""

    #: The options that load_state_dict does not change.
    options: ClassVar[tuple[str, ...]]
    #: Other settings that a saved group may lack.
    optional: ClassVar[tuple[str, ...]] = ("skipped_steps", "seed", "maximize", "differentiable")

    @staticmethod
    def check(group: Group) -> None:
        """Raises ValueError or TypeError for invalid settings of a group."""
        raise NotImplementedError

    def step_all(self) -> bool:
        """Updates all parameters that have a gradient, or none: False, if one is not finite."""
        raise NotImplementedError

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch. Raises ValueError or TypeError for invalid settings."""
        super().add_param_group(param_group)
        try:
            self.check(self.param_groups[-1])
        except (TypeError, ValueError):
            del self.param_groups[-1]
            raise

    def __getstate__(self) -> dict[str, Any]:
        """The state for copies and pickle, which cannot read torch's tensors of 8-bit formats."""
        state = super().__getstate__()
        readable = {
            p: {k: _readable(v) for k, v in entry.items()} for p, entry in state["state"].items()
        }
        return {**state, "state": defaultdict(dict, readable)}

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
        loss = None if closure is None else torch.enable_grad()(closure)()
        for parameter in parameters_of(self):
            _align_gradient(type(self).__name__, parameter)
        self._refresh_masters()
        if not self.step_all():
            for group in self.param_groups:
                group["skipped_steps"] += 1
        self._marks = {p: _mark(p) for p in self._with_master()}
        return loss

    def _with_master(self) -> list[Any]:
        return [p for p in parameters_of(self) if states.has(self.state.get(p, {}), MASTER)]

    def _refresh_masters(self) -> None:
        now = {p: _mark(p) for p in self._with_master()}
        for p in _changed(getattr(self, "_marks", {}), now):
            master = states.read(self.state[p], MASTER)
            if not states.rounds_to(decode(master).view(part_of(p).shape), p):
                encoding = ENCODINGS[dtype_name(master.values.dtype)]
                states.keep(self.state[p], MASTER, p, encoding, states.numbers_of(p).flatten())

    def state_dict(self) -> dict[str, Any]:
        """As in torch. That of a DTensor has no scales, which belong to one process: its moments
        are DTensors in float32, which `load_state_dict` rounds again."""
        saved, parameters = super().state_dict(), parameters_of(self)
        divided = {i: entry for i, entry in saved["state"].items() if is_dtensor(parameters[i])}
        portables = {i: states.portable(parameters[i], entry) for i, entry in divided.items()}
        return {**saved, "state": {**saved["state"], **portables}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch, for a state of this kind of optimizer from torch or from this package.

        The state is converted to the encodings of this optimizer: exactly if they are the same,
        else rounded to nearest. A saved master without a counterpart here is written to its
        parameter. Raises ValueError, without changing anything, for amsgrad states, states of
        another kind of optimizer, shapes that do not match, settings out of range, missing entries,
        moments that are not finite, negative second moments and an invalid step count.
        """
        groups, state = self.param_groups, self.state
        hold = self.register_load_state_dict_pre_hook(_hold)
        place = functools.partial(_place, groups)
        release = self.register_load_state_dict_post_hook(place, prepend=True)
        try:
            super().load_state_dict(state_dict)
        except BaseException:
            self.__setstate__({"state": state, "param_groups": groups})
            raise
        finally:
            hold.remove()
            release.remove()


def _align_gradient(optimizer: str, parameter: Any) -> None:
    """Lays out the gradient of a DTensor like it. Raises RuntimeError for a sparse one."""
    grad = parameter.grad
    if grad is not None and grad.layout != torch.strided:
        raise RuntimeError(f"{optimizer} needs dense gradients, got {grad.layout}")
    if is_dtensor(grad) and grad.placements != parameter.placements:
        parameter.grad = grad.detach().redistribute(placements=parameter.placements)


@dataclass(frozen=True)
class _Bits:
    tensor: Tensor

    def __reduce__(self) -> Any:
        return Tensor.view, (self.tensor.view(torch.uint8), self.tensor.dtype)


def _readable(value: Any) -> Any:
    small = type(value) is Tensor and value.is_floating_point() and value.itemsize == 1
    return _Bits(value) if small else value


_Mark = tuple[tuple[Any, ...], Tensor]
"""What changes when a parameter is written: its version, and sums of its bits, as ``.data`` and
numpy write without a new version; none for a parameter that counts such writes itself."""


def _mark(parameter: Any) -> _Mark:
    writes = getattr(parameter, "writes", ())
    version = (parameter._version, *writes, parameter.shape, parameter.dtype)
    if writes:
        return version, torch.empty(0)
    rows = torch.atleast_2d(part_of(parameter.detach())).flatten(1).contiguous()
    whole = rows.shape[1] * rows.itemsize % 8 == 0
    bits = rows.view(torch.int64 if whole else torch.int16)
    return version, torch.cat([bits.sum(0), bits.sum(1)])


def _changed(before: dict[Any, _Mark], now: dict[Any, _Mark]) -> list[Any]:
    """The parameters whose marks differ, with one synchronization with a device."""
    same = [p for p in now if p in before and before[p][0] == now[p][0]]
    flags = [(before[p][1] != now[p][1]).any() for p in same]
    differ = torch.stack([flag.to(flags[0].device) for flag in flags]).tolist() if flags else []
    return [*(now.keys() - set(same)), *itertools.compress(same, differ)]


def _hold(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Wraps each state so that torch does not cast its tensors to the dtype of the parameter."""
    held = {k: SimpleNamespace(state=v) for k, v in state_dict["state"].items()}
    return {**state_dict, "state": held}


def _place(before: list[dict[str, Any]], optimizer: Any) -> None:
    for group, old in zip(optimizer.param_groups, before, strict=True):
        if group.get("amsgrad"):
            raise ValueError("the state is of amsgrad=True, which is not supported")
        optional = {*optimizer.optional, *optimizer.options}
        missing = sorted(optimizer.defaults.keys() - group.keys() - optional)
        group.update({**old, **group, **{name: old[name] for name in optimizer.options}})
        for parameter in group["params"]:
            if parameter in optimizer.state:
                held = optimizer.state[parameter].state
                optimizer.state[parameter] = states.convert(parameter, held, group)
        if missing:
            raise ValueError(f"a group of the state has no {', '.join(missing)}")
        optimizer.check(group)
