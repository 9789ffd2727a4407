"""The state of a training run: what it holds, its copy, and which of its tensors are not finite."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ...common.dtensor import is_dtensor, part_of
from ...recipes.history import histories, set_histories


class Part(Protocol):
    """An optimizer, a scheduler or a GradScaler."""

    def state_dict(self) -> dict[str, Any]:
        """Its state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Loads a state."""


class State(NamedTuple):
    """A copy of a state, in the memory of the CPU; of DTensors and other subclasses of Tensor, on
    their devices.

    Attributes:
        step: the number of calls of `Alarm.step` before it.
        model: the state_dict.
        scales: the static scales and histories of casts, by name.
        parts: the state_dicts of the optimizer and of what else there is.
        random: the states of torch's generators: of the CPU, and of each CUDA device.
    """

    step: int
    model: dict[str, Any]
    scales: dict[str, Tensor]
    parts: list[dict[str, Any]]
    random: list[Tensor]

    def load(self, model: nn.Module, parts: Sequence[Part]) -> None:
        """Loads all but the states of generators."""
        model.load_state_dict(self.model)
        set_histories(model, self.scales)
        for part, state in zip(parts, self.parts, strict=False):
            # An optimizer may keep the tensors that it is given.
            part.load_state_dict(_copied(state))

    def set_random(self) -> None:
        """Sets torch's generators."""
        torch.set_rng_state(self.random[0])
        if len(self.random) > 1:
            torch.cuda.set_rng_state_all(self.random[1:])


def state_of(step: int, model: nn.Module, parts: Sequence[Part]) -> State:
    """A copy of the state of now."""
    random = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        random += torch.cuda.get_rng_state_all()
    states = [_copied(part.state_dict()) for part in parts]
    model_state = _copied(dict(model.state_dict()))
    return State(step, model_state, _copied(histories(model)), states, random)


def _copied(value: Any) -> Any:
    """A copy of nested containers, whose tensors are copied to the CPU."""
    if isinstance(value, Tensor):
        if type(value) in (Tensor, nn.Parameter):
            return value.detach().to("cpu", copy=True)
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    return value


# Files


def written(state: State, path: Path) -> None:
    """Writes a state; the file is whole at any time."""
    new = path.with_name(f"{path.name}.new")
    torch.save(state._asdict(), new)
    os.replace(new, path)


def read(path: Path) -> State:
    """Reads what `written` has written."""
    return State(**torch.load(path, weights_only=True))


# Values that are not finite


def named_tensors(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors in nested containers, by path: ``model.layers.0.weight``."""
    if isinstance(value, Tensor):
        yield path, value
        return
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    for key, item in items:
        yield from named_tensors(item, f"{path}.{key}" if path else str(key))


def not_finite(value: Any) -> list[str]:
    """The paths of the tensors with Inf or NaN. Reads each once, without a copy of it; of a
    DTensor, the local part."""
    devices: dict[torch.device, tuple[list[str], list[Tensor]]] = {}
    for name, tensor in named_tensors(value):
        part = part_of(tensor) if is_dtensor(tensor) else tensor.detach()
        if not part.is_floating_point() or part.is_meta or not part.numel():
            continue
        names, flags = devices.setdefault(part.device, ([], []))
        names.append(name)
        flags.append(_finite(part))
    found = []
    for names, flags in devices.values():
        finite = torch.stack(flags).tolist()
        found += [name for name, yes in zip(names, finite, strict=True) if not yes]
    return found


def _finite(part: Tensor) -> Tensor:
    """Whether all values are finite, 0-dim."""
    if type(part) not in (Tensor, nn.Parameter) or part.element_size() == 1:
        part = part.float()
    if part.is_sparse:
        part = part.coalesce().values()
    low, high = torch.aminmax(part)
    return low.isfinite() & high.isfinite()
