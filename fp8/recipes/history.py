"""The state of recipes, in buffers of the layers that `fp8.convert` converts: the amax history of
each operand (scaling "delayed"), or its scale (scaling "static") and when it is measured again."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..common.dtensor import part_of
from ..common.validation import check_module
from ..frame import FRAMES
from ..torch_internals import Keywords, Layer
from ..torch_internals.decorators import taken_as_constant
from ..warnings import PitfallWarning, show
from .recipe import OPERANDS, Recipe

_AMAX, _SCALE = "fp8_amax_", "fp8_scale_"

LOOKS = "fp8_looks"
"""The buffer of a layer with static scales that keeps the schedule of its model's looks: `Schedule`
in int64, or zeros. It is written when a state_dict is made."""


class Schedule(NamedTuple):
    """When the passes of a model look at its casts, as `fp8.casts.watch.Watch` counts them.

    Attributes:
        step: the number of the next pass, from 1.
        measures: whether that pass measures static scales again.
        wait: the passes from the next look that an operand asks for to the one after it, at least.
        asks_from: the first pass in which an operand may ask for a look.
    """

    step: int = 1
    measures: int = True
    wait: int = 1
    asks_from: int = 0


ROLES = ("input", "weight", "2")
"""The roles of the operands of a product, in the names of buffers; "2": the values of attention."""


def role_of(operand: int) -> str:
    """The role of an operand, also of one that has no buffer (of a recurrent layer)."""
    if operand < len(ROLES):
        return ROLES[operand]
    return str(operand)


class MeasuredScales:
    """Whether each static scale is set and each history has entries, or the equal scale of a layer
    that reads the same operand. Attributes: a graph reads them anew, and items of a dict once."""


class LayerState:
    """The states of a layer's operands in one call. The name of a state has the order of its
    product, or its stack of weights, if the layer has several: fp8_amax_001_matmul_input,
    fp8_amax_down_proj_3_linear_input."""

    def __init__(self, layer: Layer) -> None:
        self._layer = layer
        self._products = 0
        self._traced = torch.compiler.is_dynamo_compiling()
        watched = layer.fp8_watch
        # Only training changes scales and statistics, and counts as a pass.
        self.exports = torch.compiler.is_exporting()
        measurement = FRAMES.items[-1].measurement
        is_uncast = measurement is not None and not measurement.of_states
        if self.exports or is_uncast or not torch.is_grad_enabled():
            self.looks = self.measures = self.checks = False
            return
        if not self._traced:
            watched.watch.enters(watched)
        self.looks = watched.watch.looks
        # A graph that neither looks nor checks has no kernels for it.
        self.checks = self.looks or not self._traced or watched.watch.checks
        # Read in a look alone: a graph without one has no guard for it.
        self.measures = self.looks and watched.watch.measures
        if self.looks:
            layer.fp8_runs()

    def name_of(self, product: str, *operands: Tensor) -> str:
        """The next product in names of buffers; "" if it is the only one."""
        if not self._layer.fp8_settings.by_call:
            return ""
        for operand in operands:
            base = operand._base
            if base is None or operand.dim() != 2 or base.dim() != 3:
                continue
            for name, stack in self._layer.named_parameters(recurse=False):
                if stack is base:
                    offset = operand.storage_offset() - stack.storage_offset()
                    return f"{name}_{offset // stack.stride(0)}_{product}_"
        self._products += 1
        return f"{str(self._products).zfill(3)}_{product}_"

    def look(self, name: str, x: Tensor) -> Any:
        """Returns the `fp8.casts.counts.Look` to which the product of this name and its operand
        ``x`` write statistics; None outside of training."""
        if not self.checks:
            return None
        return self._layer.fp8_watch.look(
            name, x, is_spot=not self.looks, in_graph=self._traced
        )

    def scales(self, product: str, *operands: Tensor) -> dict[str, Tensor]:
        """Role -> the static scale that the next product of these operands reads, 0 until it is
        set; none that is not there yet, or one of each group."""
        # A copy, because `name_of` counts products.
        prefix = _SCALE + copy.copy(self).name_of(product, *operands)
        scales = {}
        for name, buffer in self._layer._buffers.items():
            if name.startswith(prefix) and buffer.numel() == 1:
                scales[name.removeprefix(prefix)] = buffer
        return scales

    def buffer(
        self, name: str, length: int, device: torch.device, groups: int = 0
    ) -> Tensor:
        """The state of an operand: float32, (length,) for a history, () for a static scale; with a
        first dimension of 1 if it is not set, and of the groups of a grouped product. Raises
        ValueError for another shape."""
        layer = self._layer
        buffer = (_AMAX if length else _SCALE) + name
        shape: tuple[int, ...] = (length,) if length else ()
        if groups:
            shape = (groups, *shape)
        if buffer not in layer._buffers:
            _check_creates(buffer)
            with torch.inference_mode(False):
                layer.register_buffer(buffer, torch.zeros(shape, device=device))
                _add_looks(layer, device)
        settled = groups or length or layer.fp8_watch.watch.frozen
        if self.measures and not settled:
            # Measured again, and so independent of what is noted: one graph.
            if self._traced:
                return part_of(getattr(layer, buffer))[None]
            layer.fp8_note(buffer)
            return part_of(layer._buffers[buffer])[None]
        # A graph reads the attribute once it is noted, so that it guards the value that stays.
        if self._traced or getattr(layer.fp8_measured, buffer, False) is False:
            layer.fp8_note(buffer)
        state = getattr(layer, buffer) if self._traced else layer._buffers[buffer]
        if type(state) is not Tensor:
            state = part_of(state)
        if state.shape != shape:
            got = f"{buffer} has the shape {tuple(state.shape)}"
            raise ValueError(f"{got}, and the recipe and the product need {shape}")
        measured = getattr(layer.fp8_measured, buffer)
        shared = self._traced and isinstance(measured, Tensor)
        if shared and measured.device == state.device:
            return measured
        if measured is False and not groups:
            return state[None]
        return state


def _check_creates(name: str) -> None:
    # Asked again, because eager code may go on with a state that was made in a graph.
    compiling = torch.compiler.is_dynamo_compiling()
    if compiling:  # torch.export raises, and leaves nothing to eager mode
        _warn_eager(name)
    if compiling or torch.compiler.is_exporting():
        raise RuntimeError(f"there is no {name} yet: run the first pass in eager mode")


@taken_as_constant
def _warn_eager(name: str) -> bool:
    show(PitfallWarning, _EAGER.format(name))
    return True


_EAGER = (
    "a compiled function calls a layer of several products for the first time, and it has no {} "
    "yet: the function runs in eager mode, now and later. Call the layer once before it is compiled"
)


def note_scale(layer: Layer, name: str) -> None:
    """Notes whether a state is set. Reads the value, which synchronizes, only if it was written."""
    measured = vars(layer.fp8_measured)
    if measured.get(name, False) is False:
        state = part_of(layer._buffers[name])
        written = not state.is_inference() and state._version > 0
        measured[name] = (
            written and not torch.compiler.is_exporting() and _is_set(name, state)
        )


def note_scales(layer: nn.Module) -> None:
    """Checks again which states of a layer are set, after they were written."""
    if "fp8_measured" in vars(layer):
        measured = vars(vars(layer)["fp8_measured"])
        measured.clear()
        states = histories(layer, recurse=False)
        measured.update({name: _is_set(name, state) for name, state in states.items()})


def _is_set(name: str, state: Tensor) -> bool:
    if state.is_meta or state.dim() != name.startswith(_AMAX):  # of a grouped product
        return False
    return bool(0 < state.amax() < torch.inf)


def share_scales(model: nn.Module, leaders: Mapping[int, int]) -> None:
    """Lets layers read the equal static scale of another one. leaders: address -> the other's."""
    states = histories(model).values()
    scales = {state.data_ptr(): state for state in states if not state.dim()}
    for module in model.modules():
        for name, state in histories(module, recurse=False).items():
            leader = scales.get(leaders.get(state.data_ptr(), 0))
            if leader is not None and not state.dim() and bool(leader == state):
                vars(module.fp8_measured)[name] = leader


def add_buffers(layer: Any, recipe: Recipe | None = None) -> None:
    """Adds the missing buffers of a recipe (None: the layer's), if it keeps any. A layer of
    several products adds its buffers in its first pass."""
    settings = layer.fp8_settings
    recipe = recipe or settings.recipe
    if not recipe.keeps_history:
        return
    if not settings.by_call:
        for name, length in _buffers_of(recipe).items():
            shape = (length,) if length else ()
            zeros = torch.zeros(shape, device=layer.weight.device)
            if getattr(layer, name, zeros[..., None]).shape != zeros.shape:
                layer.register_buffer(name, zeros)
        _add_looks(layer, layer.weight.device)
    vars(layer)["fp8_measured"] = MeasuredScales()


def _add_looks(layer: Any, device: torch.device) -> None:
    """Adds the schedule to a layer with static scales."""
    if has_scales(layer) and LOOKS not in layer._buffers:
        zeros = torch.zeros(len(Schedule._fields), dtype=torch.int64, device=device)
        layer.register_buffer(LOOKS, zeros)


def _buffers_of(recipe: Recipe) -> dict[str, int]:
    """The names of the buffers of a layer of one product -> the length of the history; 0: a static
    scale."""
    buffers = {}
    for role in OPERANDS:
        cast = getattr(recipe, role)
        if cast is not None and cast.keeps_history:
            buffers[(_AMAX if cast.history else _SCALE) + role] = cast.history
    return buffers


def is_saved(layer: Layer, recipe: Recipe, state: Keywords, prefix: str) -> bool:
    """Whether a state_dict has buffers that a layer has under ``recipe``."""
    if not recipe.keeps_history:
        return False
    if layer.fp8_settings.by_call:
        return any(key.startswith((prefix + _AMAX, prefix + _SCALE)) for key in state)
    return any(prefix + name in state for name in _buffers_of(recipe))


def remove_buffers(layer: nn.Module) -> None:
    """Removes the buffers that `add_buffers` adds."""
    for name in filter(is_history, list(layer._buffers)):
        delattr(layer, name)
    vars(layer).pop("fp8_measured", None)


def has_scales(layer: nn.Module) -> bool:
    """Whether `add_buffers` has added buffers of static scales."""
    return any(name.startswith(_SCALE) for name in layer._buffers)


def add_initial_histories(layer: Layer, state: Keywords, prefix: str) -> None:
    """Adds initial histories to a state_dict of the layer that has none, as one of the unconverted
    model. (A safetensors file has nothing under a module's second name.)"""
    buffers = {
        prefix + n: b for n, b in layer.named_buffers(recurse=False) if is_history(n)
    }
    # A layer of several products learns its buffers when it runs: the buffers of the file are
    # added.
    if "fp8_measured" in vars(layer) and layer.fp8_settings.by_call:
        for key in state:
            name = key.removeprefix(prefix)
            is_state = key.startswith(prefix) and is_history(name)
            if is_state and "." not in name and name not in layer._buffers:
                layer.register_buffer(name, torch.zeros_like(state[key]))
    has_parameters = any(prefix + name in state for name, _ in layer.named_parameters())
    if has_parameters and buffers.keys().isdisjoint(state):
        weight = state.get(prefix + "weight")
        for name, buffer in buffers.items():
            device = buffer.device if weight is None else weight.device
            state[name] = torch.zeros_like(buffer, device=device)
    looks, known = buffers.get(prefix + LOOKS), buffers.keys() & state.keys()
    if looks is not None and known:
        # Checkpoints of earlier versions have scales without a schedule.
        device = state[known.pop()].device
        state.setdefault(prefix + LOOKS, torch.zeros_like(looks, device=device))


def write_schedule(layer: nn.Module, schedule: Schedule) -> None:
    """Writes the schedule into the buffer of a layer that has one."""
    looks = layer._buffers.get(LOOKS)
    if looks is not None and not looks.is_inference():
        with torch.no_grad():
            part_of(looks).copy_(torch.tensor(schedule))


def read_schedule(layer: nn.Module) -> Schedule | None:
    """The schedule in the buffer of a layer; None if there is none."""
    looks = layer._buffers.get(LOOKS)
    if looks is None or looks.is_meta:
        return None
    schedule = Schedule(*part_of(looks).tolist())
    if schedule.step:
        return schedule
    return None


def static_scales(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The static scales among the tensors, 0-dim; of a grouped product, one for each group."""
    scales: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not tensor.dim():
            scales[name] = tensor
        elif tensor.dim() == 1 and "grouped_mm" in name and _AMAX not in name:
            scales |= {f"{name}.{i}": scale for i, scale in enumerate(tensor.unbind())}
    return scales


def is_history(name: str) -> bool:
    """Whether a buffer of this name is one that `add_buffers` adds."""
    return name.rpartition(".")[2].startswith((_AMAX, _SCALE, LOOKS))


def histories(model: nn.Module, recurse: bool = True) -> dict[str, Tensor]:
    """The states of the operands of a model, by name; the local parts of DTensors."""
    found = {}
    for name, buffer in model.named_buffers(recurse=recurse):
        if is_history(name) and not name.endswith(LOOKS):
            found[name] = part_of(buffer)
    return found


def history_of(layer: nn.Module, role: str) -> Tensor | None:
    """The state of an operand ("input", "weight", "grad") of a layer of one product; None for one
    without state."""
    for name, state in histories(layer).items():
        if name.endswith(role):
            return state
    return None


@torch.no_grad()
def set_histories(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Sets the states of a model; those that are not given, or in another shape, become unset."""
    for name, state in histories(model).items():
        known = saved.get(name)
        if known is not None and known.shape == state.shape:
            state.copy_(known)
        else:
            state.zero_()
    for module in model.modules():
        note_scales(module)


def reduce_amax(
    model: nn.Module, group: torch.distributed.ProcessGroup | None = None
) -> None:
    """Synchronizes the states of scalings "delayed" and "static" across processes: every entry
    becomes its maximum over them, in one all-reduce, as in one process with the whole batch. Call
    it on all processes after the backward pass, before the optimizer step. Does nothing if
    torch.distributed is not initialized.

    DistributedDataParallel broadcasts the buffers of the first process before each pass. Disable
    that for gradient accumulation (``forward_sync_buffers=False``; before torch 2.13,
    ``broadcast_buffers=False``).

    Args:
        model: the converted model.
        group: the processes; None: all.

    Raises:
        TypeError: if ``model`` is not a module.
    """
    from ..common.ranks import is_started, take_largest  # not loaded with the core

    check_module("reduce_amax", model)
    tensors = [tensor for _, tensor in sorted(histories(model).items())]
    if not (tensors and is_started()):
        return
    take_largest(tensors, [group])
