"""What delayed scaling remembers: the largest magnitudes of each operand in the last passes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "AmaxHistory",
    "LayerHistory",
    "begin_anew",
    "forget",
    "histories",
    "reduce_amax",
    "remember",
]

Group = torch.distributed.ProcessGroup | None


class AmaxHistory:
    """The state of a recipe with scaling "delayed": for each operand of each product its last
    largest magnitudes, newest first.

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
    Each process of a data-parallel run has its own: `reduce` makes them equal.

    tensors: name of the operand, as "001.linear.weight", -> float32 (history,).
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def tensor(self, name: str, length: int, device: torch.device) -> Tensor:
        """The history of that operand, made of zeros where it is new.

        Raises ValueError where it is of another length, RuntimeError where a compiler asks for a
        new one.
        """
        if name not in self.tensors:
            if torch.compiler.is_compiling():
                raise RuntimeError(
                    f"there is no history of {name} yet: run the first pass in eager mode"
                )
            with torch.inference_mode(False):
                self.tensors[name] = torch.zeros(length, device=device)
        known = self.tensors[name]
        if known.shape != (length,):
            raise ValueError(
                f"the history of {name} has {known.shape[0]} entries, the recipe {length}"
            )
        return known

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

    def reduce(self, group: Group = None) -> None:
        """The largest entry over the processes of ``group`` (all) for every entry: one all-reduce,
        to be called after the backward pass, by all with the same products. Nothing where there is
        one process, without torch.distributed."""
        _reduce([self.tensors[name] for name in sorted(self.tensors)], group)


def _reduce(tensors: Iterable[Tensor], group: Group) -> None:
    tensors = list(tensors)
    if not (tensors and torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    flat = torch.cat(tensors)
    torch.distributed.all_reduce(flat, torch.distributed.ReduceOp.MAX, group)
    for tensor, largest in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(largest)


_BUFFER = "fp8_amax_"
_ROLES = {"0": "input", "1": "weight", "grad": "grad"}


class LayerHistory(AmaxHistory):
    """What a converted layer remembers: its buffers ``fp8_amax_input``, ``fp8_amax_weight`` and
    ``fp8_amax_grad``, which `remember` has made."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self._layer = layer

    def tensor(self, name: str, length: int, device: torch.device) -> Tensor:
        """The buffer of that operand of the layer's one product."""
        buffer: Tensor = getattr(self._layer, _BUFFER + _ROLES[name.rpartition(".")[2]])
        return buffer


def remember(layer: Any, recipe: Any) -> None:
    """Gives ``layer``, with an input and a weight, the buffers that ``recipe`` asks for: zeros,
    float32, on the device of the weight."""
    for role in _ROLES.values():
        cast = getattr(recipe, role)
        if cast is not None and cast.history:
            zeros = torch.zeros(cast.history, device=layer.weight.device)
            layer.register_buffer(_BUFFER + role, zeros)


def forget(layer: nn.Module) -> None:
    """Takes them away again."""
    for role in _ROLES.values():
        if hasattr(layer, _BUFFER + role):
            delattr(layer, _BUFFER + role)


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
    return name.rpartition(".")[2].startswith(_BUFFER)


def histories(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that `remember` has made in a model, by name."""
    return {name: b for name, b in model.named_buffers() if _is_history(name)}


def reduce_amax(model: nn.Module, group: Group = None) -> None:
    """Makes the histories of a model that `fp8.convert` gave a recipe with scaling "delayed" equal
    over the processes of ``group`` (None: all): for each entry the largest.

    To be called by all after the backward pass, before the optimizer's step: one all-reduce; none
    where torch.distributed was not initialized, in a process of its own. Then each process scales
    as one with the whole batch would. DistributedDataParallel gives every process the buffers of
    the first before each pass; for gradient accumulation, make it not to
    (``forward_sync_buffers=False``, before torch 2.13 ``broadcast_buffers=False``).
    """
    _reduce([history for _, history in sorted(histories(model).items())], group)
