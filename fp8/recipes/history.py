"""State that recipes keep between passes: the amax history of each operand (scaling "delayed"), or
its scale (scaling "static")."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..common.compiler import eager_only, taken_as_constant
from ..common.dtensor import part_of
from ..common.mixin import check_module
from ..common.pitfalls import PitfallWarning, show

Group = torch.distributed.ProcessGroup | None


class AmaxHistory:
    """The state of a recipe: for each operand of each product the largest magnitudes of recent
    passes, newest first (scaling "delayed"), or one scale (scaling "static").

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
    block, sets it again. A function that was compiled before its scales were set measures them in
    each pass, although it uses the first. Each process of a data-parallel run has its own history;
    `reduce` makes them equal.

    Attributes:
        tensors: name of the operand, like "001.linear.0" -> float32, (history,), or () for
            "static", 0 if not set. Of a grouped product: (groups, history) or (groups,).
    """

    def __init__(self) -> None:
        self._states, self._known = Live(), Live()
        #: Number of a product -> the matrix of a stack of weights that it multiplies.
        self.matrices: dict[int, str] = {}
        #: Name of a product with a weight -> the shape of the weight.
        self.shapes: dict[str, torch.Size] = {}

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name.replace(":", "."): tensor for name, tensor in vars(self._states).items()}

    @tensors.setter
    def tensors(self, tensors: Mapping[str, Tensor]) -> None:
        self._states = Live()
        vars(self._states).update({_attribute(name): t for name, t in tensors.items()})

    @property
    def known(self) -> set[str]:
        """The operands whose static scale is set."""
        return {name.replace(":", ".") for name, is_set in vars(self._known).items() if is_set}

    def tensor(self, name: str, length: int, device: torch.device, groups: int = 0) -> Tensor:
        """The history of an operand, created with zeros if new. length: 0 for a static scale, which
        has the shape (1,) if it is to be measured. groups: the number of states, of a grouped
        product. Raises ValueError if it has another length."""
        key = _attribute(name)
        if not self._note(key):
            self._create(key, length, groups, str(device))
        state, known = getattr(self._states, key), getattr(self._known, key)
        return _checked(name, state, _shape(length, groups), known)

    @taken_as_constant
    def _note(self, key: str) -> bool:
        """Whether there is a state of this name; notes whether it is set, also for a graph."""
        states = vars(self._states)
        if key in states:
            note(self._known, key, states[key])
        return key in states

    @taken_as_constant
    def _create(self, key: str, length: int, groups: int, device: str) -> bool:
        with torch.inference_mode(False):
            vars(self._states)[key] = torch.zeros(_shape(length, groups), device=device)
        vars(self._known)[key] = False
        return True

    def number(self, counter: list[int], product: str, *operands: Tensor) -> str:
        """The name of the next product. counter: [number of products so far]. Raises ValueError if
        it multiplies another matrix of a stack, or a weight of another shape, than before."""
        name = _numbered(counter, product)
        self._check_matrix(counter[0], operands)
        self._check_weight(name, operands)
        return name

    @eager_only()
    def _check_weight(self, name: str, operands: tuple[Tensor, ...]) -> None:
        weight = operands[-1]
        if not isinstance(weight, nn.Parameter) or torch.is_inference_mode_enabled():
            return
        known = self.shapes.setdefault(name, weight.shape)
        if weight.shape != known:
            raise ValueError(
                f"product {name} multiplied a weight of shape {tuple(known)} before, and of shape "
                f"{tuple(weight.shape)} now. Products are numbered in call order: give another "
                "pass, as that of a part of the model, a history of its own, or use fp8.convert"
            )

    @eager_only()
    def _check_matrix(self, number: int, operands: tuple[Tensor, ...]) -> None:
        if torch.is_inference_mode_enabled():
            return
        matrix = next(filter(None, map(_in_stack, operands)), "none")
        known = self.matrices.setdefault(number, matrix)
        if matrix != known:
            raise ValueError(
                f"product {number} multiplied {known} of a stack of weights before, and "
                f"{matrix} now. Products are numbered in call order, which changes if a loop over "
                "experts leaves out those without tokens: use fp8.convert, which names them by "
                "expert, or grouped products"
            )

    def settle(self) -> None:
        """Checks again which static scales are set."""
        _settle(self._known, vars(self._states))

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of the tensors, for a checkpoint."""
        return {name: tensor.clone() for name, tensor in self.tensors.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replaces the state; in place if shapes agree, so that compiled code stays valid. Raises
        TypeError unless ``state`` is a dict of float32 tensors."""
        for name, tensor in state.items():
            if not (isinstance(tensor, Tensor) and tensor.dtype == torch.float32):
                raise TypeError(f"the history of {name} is no float32 tensor: {tensor!r}")
        before = self.tensors
        for name in before.keys() - state.keys():
            delattr(self._states, _attribute(name))
        for name, tensor in state.items():
            known = before.get(name)
            if known is not None and known.shape == tensor.shape:
                known.copy_(tensor)
            else:
                setattr(self._states, _attribute(name), tensor.detach().clone())
        self.settle()

    def reduce(self, group: Group = None) -> None:
        """Replaces every entry by its maximum over the processes of ``group`` (None: all), in one
        all-reduce.

        Call it after the backward pass, on all processes, with the same products. Does nothing if
        torch.distributed is not initialized.
        """
        _reduce([tensor for _, tensor in sorted(self.tensors.items())], group)


def _numbered(counter: list[int], product: str) -> str:
    counter[0] += 1
    return f"{str(counter[0]).zfill(3)}.{product}"


def _in_stack(operand: Tensor) -> str:
    """Which matrix of a stack of weights an operand is a view of; "" if of none."""
    stack = operand._base
    if operand.dim() != 2 or not isinstance(stack, nn.Parameter) or stack.dim() != 3:
        return ""
    offset = operand.storage_offset() - stack.storage_offset()
    return f"matrix {offset // stack.stride(0)}"


def _reduce(tensors: Iterable[Tensor], group: Group) -> None:
    tensors = list(tensors)
    if not (tensors and torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    torch.distributed.all_reduce(flat, torch.distributed.ReduceOp.MAX, group)
    for tensor, largest in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(largest.view_as(tensor))


class Live:
    """Values by name, as attributes: a graph reads an item of a dict as it was when the trace first
    read the dict, and an attribute as it is."""


def _attribute(name: str) -> str:
    return name.replace(".", ":")  # no name of an attribute that a graph reads has a dot


def note(known: Live, name: str, state: Tensor) -> None:
    """Notes whether a state is a static scale that is set."""
    if not vars(known).get(name):
        vars(known)[name] = not torch.compiler.is_exporting() and _is_set(part_of(state))


def _settle(known: Live, states: Mapping[str, Tensor]) -> None:
    vars(known).clear()
    vars(known).update({name: _is_positive(part_of(state)) for name, state in states.items()})


def _checked(name: str, state: Tensor, shape: torch.Size, known: bool) -> Tensor:
    if state.shape != shape:
        raise ValueError(
            f"the history of {name} has shape {tuple(state.shape)}, and the recipe and the product "
            f"need {tuple(shape)}"
        )
    return state if shape or known else state.view(1)


def _shape(length: int, groups: int = 0) -> torch.Size:
    return torch.Size(size for size in (groups, length) if size)


def _is_positive(scale: Tensor) -> bool:
    return not scale.dim() and not scale.is_meta and bool(scale > 0)


def _is_set(scale: Tensor) -> bool:
    """Whether a scale was set. Reads the value, which synchronizes, only if it was written."""
    return not scale.is_inference() and scale._version > 0 and _is_positive(scale)


_AMAX, _SCALE = "fp8_amax_", "fp8_scale_"
_ROLES = {"0": "input", "1": "weight", "grad": "grad"}
_KNOWN = "fp8_known"
"""The attribute of a layer that says which of its static scales are set."""
_BY_CALL = "fp8_by_call"
"""The attribute of a layer that says whether it computes several products."""


class LayerHistory(AmaxHistory):
    """The history of a converted layer, in its buffers.

    Of a layer with one product: ``fp8_amax_input`` or ``fp8_scale_input``, and so on. A layer of
    several products names each by its order in the forward pass, ``fp8_amax_001_grouped_mm_input``,
    or after the matrix of a stack of weights: ``fp8_amax_down_proj_3_linear_input``.
    """

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def number(self, counter: list[int], product: str, *operands: Tensor) -> str:
        """As in `AmaxHistory`, or the name and index of the weight in a stack of the layer."""
        stacks = {n: p for n, p in self._layer.named_parameters(recurse=False) if p.dim() == 3}
        for operand in operands:
            for name, stack in stacks.items():
                if operand.dim() == 2 and operand._base is not None and operand._base is stack:
                    offset = operand.storage_offset() - stack.storage_offset()
                    return f"{name}.{offset // stack.stride(0)}.{product}"
        return _numbered(counter, product)

    def tensor(self, name: str, length: int, device: torch.device, groups: int = 0) -> Tensor:
        """The buffer of an operand of a product of the layer."""
        layer = self._layer
        product, _, operand = name.rpartition(".")
        role = _ROLES.get(operand, operand)
        if layer.fp8_by_call:
            role = f"{product.replace('.', '_')}_{role}"
        buffer, shape = (_AMAX if length else _SCALE) + role, _shape(length, groups)
        if buffer not in layer._buffers:
            _check_creates(name)
            layer.register_buffer(buffer, torch.zeros(shape, device=device))
        layer.fp8_note(buffer)
        state = part_of(getattr(layer, buffer))
        return _checked(name, state, shape, getattr(layer.fp8_known, buffer))

    def settle(self) -> None:
        """Checks again which static scales are set."""
        settle(self._layer)


def _check_creates(name: str) -> None:
    compiling = torch.compiler.is_dynamo_compiling()
    if compiling:  # torch.export raises, and leaves nothing to eager mode
        _warn_eager(name)
    if compiling or torch.compiler.is_exporting():
        raise RuntimeError(f"there is no history of {name} yet: run the first pass in eager mode")


@taken_as_constant
def _warn_eager(name: str) -> bool:
    show(PitfallWarning, _EAGER.format(name))
    return True


_EAGER = (
    "a compiled function calls a layer of several products for the first time, and there is no "
    "history of {} yet: the function runs in eager mode, now and later. Call the layer once before "
    "it is compiled"
)


def remember(layer: Any, recipe: Any, by_call: bool = False) -> None:
    """Adds the buffers that ``recipe`` needs to ``layer``, zeros; those that it has stay. by_call:
    the layer computes several products, and its first pass creates the buffers."""
    for role in () if by_call else _ROLES.values():
        cast = getattr(recipe, role)
        if cast is not None and cast.keeps_history:
            zeros = torch.zeros(_shape(cast.history), device=layer.weight.device)
            name = (_AMAX if cast.history else _SCALE) + role
            if getattr(layer, name, zeros[..., None]).shape != zeros.shape:
                layer.register_buffer(name, zeros)
    vars(layer).update({_KNOWN: Live(), _BY_CALL: by_call})


def forget(layer: nn.Module) -> None:
    """Removes the buffers that `remember` adds."""
    for name in [name for name, _ in layer.named_buffers(recurse=False) if is_history(name)]:
        delattr(layer, name)
    for attribute in (_KNOWN, _BY_CALL):
        vars(layer).pop(attribute, None)


def has_scales(layer: nn.Module) -> bool:
    """Whether `remember` has added buffers of static scales."""
    return any(name.startswith(_SCALE) for name, _ in layer.named_buffers(recurse=False))


def settle(layer: nn.Module) -> None:
    """Checks again which static scales of a layer are set, after they were written."""
    if _KNOWN in vars(layer):
        _settle(
            vars(layer)[_KNOWN],
            {n: x for n, x in layer.named_buffers(recurse=False) if is_history(n)},
        )


def add_initial_histories(layer: nn.Module, state: dict[str, Any], prefix: str) -> None:
    """Adds initial histories to a state_dict of the layer that has none, so that a checkpoint of
    the unconverted model loads. (A safetensors file has nothing under a module's second name.)"""
    own = {prefix + name: b for name, b in layer.named_buffers(recurse=False) if is_history(name)}
    if vars(layer).get(_BY_CALL):
        for key in state:
            name = key.removeprefix(prefix)
            if key.startswith((prefix + _AMAX, prefix + _SCALE)) and name not in layer._buffers:
                layer.register_buffer(name, torch.zeros_like(state[key]))
    known = any(prefix + name in state for name, _ in layer.named_parameters())
    if known and own.keys().isdisjoint(state):
        weight = state.get(prefix + "weight")
        for name, buffer in own.items():
            device = buffer.device if weight is None else weight.device
            state[name] = torch.zeros_like(buffer, device=device)


def static_scales(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The static scales among the tensors, 0-dim; of a grouped product, one for each group."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        groups = tensor.dim() == 1 and "grouped_mm" in name and _AMAX not in name
        parts = tensor.unbind() if groups else ()
        found |= {f"{name}.{i}": part for i, part in enumerate(parts)}
        found |= {name: tensor} if not tensor.dim() else {}
    return found


def is_history(name: str) -> bool:
    """Whether a buffer of this name is one that `remember` adds."""
    return name.rpartition(".")[2].startswith((_AMAX, _SCALE))


def histories(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that `remember` added to a model, by name; of replicated DTensors the part."""
    return {name: part_of(b) for name, b in model.named_buffers() if is_history(name)}


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
