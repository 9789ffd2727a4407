"""What recipes keep of each operand between passes: of scaling "delayed" its largest magnitudes in
the last ones, of "static" its scale."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..common.mixin import check_module

__all__ = [
    "AmaxHistory",
    "LayerHistory",
    "begin_anew",
    "forget",
    "has_scales",
    "histories",
    "reduce_amax",
    "remember",
    "settle",
]

Group = torch.distributed.ProcessGroup | None


class AmaxHistory:
    """The state of a recipe with scaling "delayed" or "static": for each operand of each product
    its last largest magnitudes, newest first, or its one scale.

        history = fp8.AmaxHistory()
        for batch in batches:
            with fp8.autocast("delayed", history=history):
                loss = model(batch)
            loss.backward()

    One object belongs to one block that is opened once for each pass: the products are numbered in
    the order in which they are called, which must be the same in every pass, as far as it goes. A
    pass in which gradients are recorded adds one entry for each operand (a backward pass for the
    gradient), so under gradient accumulation every micro-batch counts as a pass; other passes only
    read. Until there is an entry an operand is scaled by its own largest magnitude; zero, Inf and
    NaN are not remembered. The first pass creates the entries and cannot be compiled; afterwards a
    function that contains the block can be.
    With scaling "static" the first pass in which an operand is neither zero nor Inf or NaN sets its
    scale for good: the power of two nearest to its RMS. `fp8.calibrate`, called inside of the
    block, sets it anew.
    Each process of a data-parallel run has its own: `reduce` makes them equal.

    tensors: name of the operand, as "001.linear.0", -> float32 (history,), or () for "static", 0
    where the scale is not known.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        #: The operands whose static scale is known.
        self.known: set[str] = set()

    def tensor(self, name: str, length: int, device: torch.device) -> Tensor:
        """The history of that operand, made of zeros where it is new. length: 0 for a static scale,
        as `_static` gives it.

        Raises ValueError where it is of another length, RuntimeError where a compiler asks for a
        new one.
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
        """``scale``, or a view of shape (1,) where it is not known and is to be measured.

        Eager code looks whether a pass has set it; where a compiler asks, known is what was so at
        the last look, so that its graph measures nothing or does not cease to.
        """
        if name not in self.known:
            if torch.compiler.is_compiling() or not _is_set(scale):
                return scale.view(1)
            self.known.add(name)
        return scale

    def settle(self) -> None:
        """Looks anew which static scales are known."""
        self.known = {name for name, t in self.tensors.items() if _is_positive(t)}

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of the tensors, for a checkpoint."""
        return {name: tensor.clone() for name, tensor in self.tensors.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes the place of what is remembered; in place where shapes agree, so that compiled code
        goes on. Raises TypeError for what is not a dict of float32 tensors."""
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
        """The largest entry over the processes of ``group`` (all) for every entry: one all-reduce,
        to be called after the backward pass, by all with the same products. Nothing where there is
        one process, without torch.distributed."""
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
    """Whether a scale was set since it was made. The host looks at it, and so waits for its device,
    only where something was written."""
    return not scale.is_inference() and scale._version > 0 and _is_positive(scale)


_AMAX, _SCALE = "fp8_amax_", "fp8_scale_"
_ROLES = {"0": "input", "1": "weight", "grad": "grad"}
_KNOWN = "fp8_known"
"""The attribute of a layer with the roles whose static scale is known."""


class LayerHistory(AmaxHistory):
    """What a converted layer remembers: its buffers ``fp8_amax_input``, ``fp8_amax_weight`` and
    ``fp8_amax_grad``, or ``fp8_scale_input`` and so on, which `remember` has made."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def tensor(self, name: str, length: int, device: torch.device) -> Tensor:
        """The buffer of that operand of the layer's one product."""
        role = _ROLES[name.rpartition(".")[2]]
        buffer: Tensor = getattr(self._layer, (_AMAX if length else _SCALE) + role)
        if length or role in self._layer.fp8_known:
            return buffer
        if torch.compiler.is_compiling() or not _is_set(buffer):
            return buffer.view(1)
        self._layer.fp8_known = (*self._layer.fp8_known, role)
        return buffer

    def settle(self) -> None:
        """Looks anew which static scales are known."""
        settle(self._layer)


def remember(layer: Any, recipe: Any) -> None:
    """Gives ``layer``, with an input and a weight, the buffers that ``recipe`` asks for: zeros,
    float32, on the device of the weight."""
    for role in _ROLES.values():
        cast = getattr(recipe, role)
        if cast is not None and cast.keeps_history:
            zeros = _zeros(cast.history, layer.weight.device)
            layer.register_buffer((_AMAX if cast.history else _SCALE) + role, zeros)
    vars(layer)[_KNOWN] = ()


def forget(layer: nn.Module) -> None:
    """Takes them away again."""
    for name in [name for name, _ in layer.named_buffers(recurse=False) if _is_history(name)]:
        delattr(layer, name)
    vars(layer).pop(_KNOWN, None)


def has_scales(layer: nn.Module) -> bool:
    """Whether `remember` has made buffers of static scales."""
    return any(name.startswith(_SCALE) for name, _ in layer.named_buffers(recurse=False))


def settle(layer: nn.Module) -> None:
    """Looks anew which static scales of a layer are known, after something has written them."""
    if _KNOWN in vars(layer):
        kept = ((role, getattr(layer, _SCALE + role, None)) for role in _ROLES.values())
        known = tuple(role for role, scale in kept if scale is not None and _is_positive(scale))
        vars(layer)[_KNOWN] = known


def begin_anew(layer: nn.Module, state: dict[str, Any], prefix: str) -> None:
    """Puts the histories of ``layer`` as they are at first into a state_dict that has none of them,
    so that a checkpoint of the plain model loads. One with nothing of the layer under this name, as
    safetensors writes the second name of a module, says nothing of them."""
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
    """The buffers that `remember` has made in a model, by name."""
    return {name: b for name, b in model.named_buffers() if _is_history(name)}


def reduce_amax(model: nn.Module, group: Group = None) -> None:
    """Makes the histories of a model that `fp8.convert` gave a recipe with scaling "delayed" or
    "static" equal over the processes of ``group`` (None: all): for each entry the largest.

    To be called by all after the backward pass, before the optimizer's step: one all-reduce; none
    where torch.distributed was not initialized, in a process of its own. Then each process scales
    as one with the whole batch would. DistributedDataParallel gives every process the buffers of
    the first before each pass; for gradient accumulation, make it not to
    (``forward_sync_buffers=False``, before torch 2.13 ``broadcast_buffers=False``).
    """
    check_module("reduce_amax", model)
    _reduce([history for _, history in sorted(histories(model).items())], group)
