"""What the optimizers of `fp8.optim` share: steps that are taken whole or not at all, states that
are loaded in any encoding, masters that follow their weights."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from ..formats.format import dtype_name
from .encodings import ENCODINGS, decode
from .state import (
    MASTER,
    Group,
    State,
    has,
    keep,
    numbers_of,
    parameters_of,
    read,
    rounds_to,
    warn_of_broadcasts,
)

__all__ = ["LowPrecision", "refuse"]


def refuse(**options: bool | None) -> None:
    """Raises ValueError for options of torch's optimizers that are on and not supported here."""
    for name, value in options.items():
        if value not in (None, False):
            raise ValueError(
                f"{name}={value!r} is not supported in low precision: leave it out, or pass False; "
                "torch.optim has it"
            )


class LowPrecision(Optimizer):
    """The base of the optimizers: they say how to check a group, step, and read another's state."""

    #: What load_state_dict leaves as the optimizer has it.
    options: ClassVar[tuple[str, ...]]

    @staticmethod
    def check(group: Group) -> None:
        """Raises ValueError and TypeError for what a group cannot have."""
        raise NotImplementedError

    def step_all(self) -> bool:
        """Steps all parameters that have a gradient; or none, where one is not finite: False."""
        raise NotImplementedError

    @staticmethod
    def converted(parameter: Tensor, saved: State, group: Group) -> State:
        """``saved``, the state of such an optimizer, as ``group`` keeps it."""
        raise NotImplementedError

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch. Raises ValueError and TypeError for what a group cannot have."""
        super().add_param_group(param_group)
        try:
            self.check(self.param_groups[-1])
        except (TypeError, ValueError):
            del self.param_groups[-1]
            raise

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickle, which cannot read torch's tensors of 8-bit formats."""
        state = super().__getstate__()
        kept = {p: {k: _readable(v) for k, v in own.items()} for p, own in state["state"].items()}
        return {**state, "state": defaultdict(dict, kept)}

    @property
    def skipped_steps(self) -> int:
        """How many steps were left out, because a gradient or its square was not finite."""
        return int(self.param_groups[0]["skipped_steps"])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of all parameters that have a gradient, or of none; returns the closure's loss.

        A parameter may be any tensor that ``p.detach().to(torch.float32)`` reads and
        ``p.copy_(float32)`` writes, and its gradient one that ``.to(torch.float32)`` reads.
        What others have written to a parameter with a master since the last step is its master
        from now on. Raises RuntimeError for a sparse gradient.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._refresh_masters()
        if not self.step_all():
            for group in self.param_groups:
                group["skipped_steps"] += 1
        self._versions = {p: _version(p) for p in self._with_master()}
        for p in self._versions:
            vars(p).pop("loaded", None)
        return loss

    def _with_master(self) -> list[Any]:
        return [p for p in parameters_of(self) if p in self.state and has(self.state[p], MASTER)]

    def _refresh_masters(self) -> None:
        """Begins masters anew whose weights are not what they round to."""
        known = getattr(self, "_versions", {})
        for p in self._with_master():
            if known.get(p) == _version(p):
                continue
            master = read(self.state[p], MASTER)
            if not rounds_to(decode(master).view(p.shape), p):
                if "loaded" not in vars(p):
                    warn_of_broadcasts()
                encoding = ENCODINGS[dtype_name(master.values.dtype)]
                keep(self.state[p], MASTER, p, encoding, numbers_of(p))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch, with the state of such an optimizer of torch or of this module.

        It is converted to the encodings that this one has: exactly where they are the same, else
        rounded to nearest. A master that is not kept here is written to its parameter.
        Raises ValueError, and changes nothing, for amsgrad's state, that of another kind of
        optimizer, shapes that are not those of the parameters, settings out of range, what is
        missing, moments that are not finite, negative second ones and a step that is no count.
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


@dataclass(frozen=True)
class _Bits:
    """A tensor on its way through pickle, as plain bytes."""

    tensor: Tensor

    def __reduce__(self) -> Any:
        return _viewed, (self.tensor.view(torch.uint8), self.tensor.dtype)


def _viewed(bits: Tensor, dtype: torch.dtype) -> Tensor:
    return bits.view(dtype)


def _readable(value: Any) -> Any:
    small = type(value) is Tensor and value.is_floating_point() and value.itemsize == 1
    return _Bits(value) if small else value


def _version(parameter: Any) -> tuple[int, ...]:
    """What changes when the parameter is written to."""
    return (parameter._version, *getattr(parameter, "writes", ()))


def _hold(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Wraps each state so that torch does not cast what is in it to the dtype of the parameter."""
    return {**state_dict, "state": {k: _Held(v) for k, v in state_dict["state"].items()}}


@dataclass(frozen=True)
class _Held:
    state: Any


def _place(before: list[dict[str, Any]], optimizer: Any) -> None:
    """After torch has mapped states to parameters: converts them, and completes the groups."""
    for group, old in zip(optimizer.param_groups, before, strict=True):
        if group.get("amsgrad"):
            raise ValueError("this is the state of amsgrad=True, which is not had here")
        optional = {"skipped_steps", "seed", "maximize", "differentiable", *optimizer.options}
        missing = sorted(optimizer.defaults.keys() - group.keys() - optional)
        group.update({**old, **group, **{name: old[name] for name in optimizer.options}})
        for parameter in group["params"]:
            if parameter in optimizer.state:
                held = optimizer.state[parameter].state
                optimizer.state[parameter] = optimizer.converted(parameter, held, group)
        if missing:
            raise ValueError(f"a group of the state has no {', '.join(missing)}")
        optimizer.check(group)
