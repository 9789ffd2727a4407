"""State that recipes keep between passes: the amax history of each operand (scaling "delayed"), or
its scale (scaling "static")."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..common.dtensor import part_of
from ..common.mixin import check_module

__all__ = [
    "AmaxHistory",
    "LayerHistory",
    "add_initial_histories",
    "forget",
    "has_scales",
    "histories",
    "reduce_amax",
    "remember",
    "settle",
]

Group = torch.distributed.ProcessGroup | None


class AmaxHistory:
    """The state of a recipe with scaling "delayed" or "static".

    For each operand of each product it stores the largest magnitudes of recent passes, newest
    first, or one static scale.

        history = fp8.AmaxHistory()
        for batch in batches:
            with fp8.autocast("delayed", history=history):
                loss = model(batch)
            loss.backward()

    One object belongs to one block that is opened once per pass. Products are numbered in call
    order, which must be the same in every pass. A pass that records gradients adds one entry per
    operand (for the gradient, a backward pass does), so under gradient accumulation every
    micro-batch is a pass. Other passes only read. An operand without entries is scaled by its own
    largest magnitude. Zero, Inf and NaN are not recorded. The first pass creates the entries and
    cannot be compiled; afterwards a function that contains the block can be compiled.

    With scaling "static", the first pass in which an operand is finite and not all zeros sets its
    scale permanently, to the power of two nearest to its RMS. `fp8.calibrate`, called inside of the
    block, sets it again.

    Each process of a data-parallel run has its own history; `reduce` makes them equal.

    Attributes:
        tensors: name of the operand, like "001.linear.0" -> float32, (history,), or () for
            "static", 0 if not set.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        #: The operands whose static scale is set.
        self.known: set[str] = set()

    def tensor(self, name: str, length: int, device: torch.device) -> Tensor:
        """The history of an operand, created with zeros if new. length: 0 for a static scale, which
        is returned as by `_static`.

        Raises ValueError if it has another length, RuntimeError if it would be created while
        compiling.
        """
        if name not in self.tensors:
            if torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting():
                raise RuntimeError(
                    f"there is no history of {name} yet: run the first pass in eager mode"
                )
            with torch.inference_mode(False):
                self.tensors[name] = _zeros(length, device)
        known = self.tensors[name]
        entries = known.numel() if known.dim() else 0
        if entries != length:
            raise ValueError(f"the history of {name} has {entries} entries, the recipe {length}")
        return known if length else self._static(name, known)

    def _static(self, name: str, scale: Tensor) -> Tensor:
        """``scale``, or a view of shape (1,) if it is not set and is to be measured.

        Eager code checks whether a pass has set it. While compiling, the result of the last check
        is used, so that the graph does not switch between measuring and not.
        """
        if name not in self.known:
            if torch.compiler.is_compiling() or not _is_set(scale):
                return scale.view(1)
            self.known.add(name)
        return scale

    def settle(self) -> None:
        """Checks again which static scales are set."""
        self.known = {name for name, t in self.tensors.items() if _is_positive(t)}

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of the tensors, for a checkpoint."""
        return {name: tensor.clone() for name, tensor in self.tensors.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replaces the state; in place if shapes agree, so that compiled code stays valid. Raises
        TypeError unless ``state`` is a dict of float32 tensors."""
        for name, tensor in state.items():
            if not (isinstance(tensor, Tensor) and tensor.dtype == torch.float32):
                raise TypeError(f"the history of {name} is no float32 tensor: {tensor!r}")
        for name in set(self.tensors) - set(state):
            del self.tensors[name]
        for name, tensor in state.items():
            known = self.tensors.get(name)
            if known is not None and known.shape == tensor.shape:
                known.copy_(tensor)
            else:
                self.tensors[name] = tensor.detach().clone()
        self.settle()

    def reduce(self, group: Group = None) -> None:
        """Replaces every entry by its maximum over the processes of ``group`` (None: all), in one
        all-reduce.

        Call it after the backward pass, on all processes, with the same products. Does nothing if
        torch.distributed is not initialized.
        """
        _reduce([self.tensors[name] for name in sorted(self.tensors)], group)


def _reduce(tensors: Iterable[Tensor], group: Group) -> None:
    tensors = list(tensors)
    if not (tensors and torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    torch.distributed.all_reduce(flat, torch.distributed.ReduceOp.MAX, group)
    for tensor, largest in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(largest.view_as(tensor))


def _zeros(length: int, device: torch.device) -> Tensor:
    return torch.zeros((length,) if length else (), device=device)


def _is_positive(scale: Tensor) -> bool:
    return not scale.dim() and not scale.is_meta and bool(scale > 0)


def _is_set(scale: Tensor) -> bool:
    """Whether a scale was set since it was created. Reads the value, which synchronizes with its
    device, only if the tensor was written."""
    return not scale.is_inference() and scale._version > 0 and _is_positive(scale)


_AMAX, _SCALE = "fp8_amax_", "fp8_scale_"
_ROLES = {"0": "input", "1": "weight", "grad": "grad"}
_KNOWN = "fp8_known"
"""The attribute of a layer that lists the roles whose static scale is set."""


class LayerHistory(AmaxHistory):
    """The history of a converted layer: the buffers ``fp8_amax_input``, ``fp8_amax_weight`` and
    ``fp8_amax_grad``, or ``fp8_scale_input`` and so on, which `remember` creates."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def tensor(self, name: str, length: int, device: torch.device) -> Tensor:
        """The buffer of an operand of the layer's product."""
        role = _ROLES[name.rpartition(".")[2]]
        buffer: Tensor = part_of(getattr(self._layer, (_AMAX if length else _SCALE) + role))
        if length or role in self._layer.fp8_known:
            return buffer
        if torch.compiler.is_compiling() or not _is_set(buffer):
            return buffer.view(1)
        self._layer.fp8_known = (*self._layer.fp8_known, role)
        return buffer

    def settle(self) -> None:
        """Checks again which static scales are set."""
        settle(self._layer)


def remember(layer: Any, recipe: Any) -> None:
    """Adds the buffers that ``recipe`` needs to ``layer``, which has an input and a weight: zeros,
    float32, on the device of the weight. Buffers of that name and shape stay."""
    for role in _ROLES.values():
        cast = getattr(recipe, role)
        if cast is not None and cast.keeps_history:
            zeros = _zeros(cast.history, layer.weight.device)
            name = (_AMAX if cast.history else _SCALE) + role
            if getattr(layer, name, zeros[..., None]).shape != zeros.shape:
                layer.register_buffer(name, zeros)
    vars(layer)[_KNOWN] = ()


def forget(layer: nn.Module) -> None:
    """Removes the buffers that `remember` adds."""
    for name in [name for name, _ in layer.named_buffers(recurse=False) if _is_history(name)]:
        delattr(layer, name)
    vars(layer).pop(_KNOWN, None)


def has_scales(layer: nn.Module) -> bool:
    """Whether `remember` has added buffers of static scales."""
    return any(name.startswith(_SCALE) for name, _ in layer.named_buffers(recurse=False))


def settle(layer: nn.Module) -> None:
    """Checks again which static scales of a layer are set, after they were written."""
    if _KNOWN in vars(layer):
        kept = ((role, part_of(getattr(layer, _SCALE + role, None))) for role in _ROLES.values())
        known = tuple(role for role, scale in kept if scale is not None and _is_positive(scale))
        vars(layer)[_KNOWN] = known


def add_initial_histories(layer: nn.Module, state: dict[str, Any], prefix: str) -> None:
    """Adds initial histories of ``layer`` to a state_dict that has none, so that a checkpoint of
    the unconverted model loads. A state_dict without any parameter of the layer under this name,
    like safetensors files for a module's second name, is left unchanged."""
    own = {prefix + name: b for name, b in layer.named_buffers(recurse=False) if _is_history(name)}
    known = any(prefix + name in state for name, _ in layer.named_parameters())
    if known and own.keys().isdisjoint(state):
        weight = state.get(prefix + "weight")
        for name, buffer in own.items():
            device = buffer.device if weight is None else weight.device
            state[name] = torch.zeros_like(buffer, device=device)


def _is_history(name: str) -> bool:
    return name.rpartition(".")[2].startswith((_AMAX, _SCALE))


def histories(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that `remember` added to a model, by name. parallelize_module makes DTensors of
    them, replicated: of these the local tensors."""
    return {name: part_of(b) for name, b in model.named_buffers() if _is_history(name)}


def reduce_amax(model: nn.Module, group: Group = None) -> None:
    """Synchronizes the histories of a converted model across processes.

    For a model that `fp8.convert` gave a recipe with scaling "delayed" or "static": every entry
    becomes its maximum over the processes, in one all-reduce. Each process then scales as one
    process with the whole batch would. Call it on all processes after the backward pass, before the
    optimizer step. Does nothing if torch.distributed is not initialized.

    DistributedDataParallel broadcasts the buffers of the first process before each pass. Disable
    that for gradient accumulation (``forward_sync_buffers=False``; before torch 2.13,
    ``broadcast_buffers=False``).

    Args:
        model: the converted model.
        group: the processes; None: all.

    Raises:
        TypeError: if ``model`` is not a module.
    """
    check_module("reduce_amax", model)
    _reduce([history for _, history in sorted(histories(model).items())], group)
