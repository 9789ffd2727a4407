"""`load`: reads a checkpoint in low precision into a model."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..common.dtensor import is_dtensor
from ..common.libraries import need
from ..common.mixin import check_module
from ..common.step import unwrapped
from ..levels.weights import copied_parameter, replace, scaled_parameter
from ..selection.policies import bare_name
from ..surgery.convert import check_ready
from ..tensors.scaled_tensor import DTYPES, ScaledTensor
from .layouts import memory_of, names_in
from .weights import state_of

M = TypeVar("M", bound=nn.Module)

Source = str | os.PathLike[str] | Mapping[str, Tensor]

OF_ACTIVATIONS = (
    *("input_scale", "input_scale_ub", "input_global_scale", "activation_scale"),
    *("output_scale", "q_scale", "k_scale", "v_scale"),
)
"""Last parts of the names of scales of activations and caches, which are left in the file: casts
compute their own."""


def load(model: M, source: Source, *, frozen: bool = True) -> M:
    """Loads a checkpoint in low precision into ``model``, in place.

    Reads what `fp8.export` writes, and the files of model hubs (docs/fine-tuning.md lists their
    layouts). A weight is ``values * scale`` in float32, rounded once to the dtype of its parameter.
    Scales of activations are left in the file. Names are those of the model's state_dict; of tied
    names one is enough.

    Args:
        model: plain or converted, changed in place. Parameters on the meta device get the memory of
            the file.
        source: a safetensors file; a folder with ``model.safetensors`` or its index; or a
            state_dict, whose tensors are copied.
        frozen: True makes each weight in low precision a `ScaledTensor` with the values and scales
            of the file, one byte a value, which does not require a gradient, as by
            `fp8.store_frozen`: add adapters and make optimizers after it. False gives all
            parameters in high precision, in the dtypes that they have.

    Returns:
        ``model``.

    Raises:
        ValueError: for missing and unexpected names, another shape, weights stored otherwise than
            in FP8 or FP4, unlike tensors of tied names, and shards. Nothing has changed then.
        TypeError: if ``model`` is not a module or ``source`` neither a path nor a state_dict.
        ImportError: for files without safetensors.

    >>> import torch, fp8
    >>> weight = torch.ones(2, 4).to(torch.float8_e4m3fn)
    >>> scale = torch.tensor([[1.0], [3.0]])
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 2, bias=False))
    >>> model = fp8.load(model, {"0.weight": weight, "0.weight_scale": scale})
    >>> model[0].weight.stored.dtype, model(torch.ones(4)).tolist()
    (torch.float8_e4m3fn, [4.0, 12.0])
    """
    check_module("load", model)
    check_ready(model)
    checkpoint, tied = _read(source)
    inner = unwrapped(model)
    targets = {name: target for name, (_, target) in state_of(inner).items()}
    read = partial(names_in, checkpoint, targets=targets)
    names = {name: parts for name in targets if (parts := read(name) or read(tied.get(name, "")))}
    _check(inner, targets, names, checkpoint)
    new: dict[Tensor, Tensor] = {}
    state: dict[str, Tensor] = {}
    for name, parts in names.items():
        target = targets[name]
        if target not in new:
            tensors = {part: checkpoint[key] for part, key in parts.items()}
            value = _value(name, tensors, target, frozen)
            if isinstance(value, ScaledTensor) or target.is_meta:
                new[target] = value
            else:
                state[name] = value
    replace(inner, new)
    full = {bare_name(name): name for name in inner.state_dict()}
    inner.load_state_dict({full[name]: value for name, value in state.items()}, strict=False)
    return model


def _read(source: Source) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a checkpoint, and its ties: other name -> name."""
    if isinstance(source, Mapping):
        return _parts_of(source), {}
    if not isinstance(source, str | os.PathLike):
        raise TypeError(f"load reads a path or a state_dict, not a {type(source).__name__}")
    path, tied = Path(source), {}
    files = [path]
    if path.is_dir():
        index, about = path / "model.safetensors.index.json", path / "fp8.json"
        files = [path / "model.safetensors"]
        if index.exists():
            shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            files = [path / shard for shard in sorted(set(shards))]
        if about.exists():
            tied = json.loads(about.read_text(encoding="utf-8"))["tied"]
    if absent := [file for file in files if not file.is_file()]:
        raise ValueError(f"load found no file {absent[0]}")
    load_file = need("safetensors").load_file
    return {name: t for file in files for name, t in load_file(file).items()}, tied


def _parts_of(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Copies of the plain tensors that a state_dict consists of, under their names in files."""
    parts: dict[str, Tensor] = {}
    for name, x in state.items():
        path, dot, last = name.rpartition(".")
        if isinstance(x, ScaledTensor):
            if x.scale is not None and x.is_whole() and x.stored.itemsize == 1:
                parts |= {name: x.stored, f"{name}_scale": x.scale}
            else:
                parts[name] = x.dequantize()
        elif type(x).__name__ == "Float8Tensor":  # torchao's
            stem = f"{path}{dot}_{last}"
            parts |= {f"{stem}_qdata": x.qdata, f"{stem}_scale": x.scale}
        elif type(x) in (Tensor, nn.Parameter):
            parts[name] = x
        elif isinstance(x, Tensor):
            kind = type(x).__name__
            raise ValueError(f"{name} is a {kind}, which load cannot read: dequantize it before")
    return {name: x.detach().clone() for name, x in parts.items()}


def _check(
    model: nn.Module,
    targets: Mapping[str, Tensor],
    names: Mapping[str, Mapping[str, str]],
    checkpoint: Mapping[str, Tensor],
) -> None:
    """Raises the ValueErrors of `load` that concern names, ties, shards and meta buffers."""
    first: dict[int, str] = {}
    for name, parts in names.items():
        other = first.setdefault(id(targets[name]), name)
        tensors = (checkpoint[key].float() for key in (parts["values"], names[other]["values"]))
        if other != name and not torch.equal(*tensors):
            raise ValueError(f"{other} and {name} are one parameter, with unlike tensors here")
    known = {*OF_ACTIVATIONS, *(key for parts in names.values() for key in parts.values())}
    differ = {
        "missing": [name for name, target in targets.items() if id(target) not in first],
        "unexpected": [k for k in checkpoint if not {k, k.rpartition(".")[2]} & known],
    }
    if text := "; ".join(f"{what}: {', '.join(keys)}" for what, keys in differ.items() if keys):
        kind = type(model).__name__
        raise ValueError(f"the checkpoint and {kind} have other names: {text}")
    if divided := [name for name, target in targets.items() if is_dtensor(target)]:
        raise ValueError(f"processes divide {divided[0]}: load before fully_shard")
    for name, buffer in model.named_buffers():
        if buffer.is_meta and bare_name(name) not in targets:
            raise ValueError(f"{name} is on the meta device and in no checkpoint: give it memory")


def _value(name: str, tensors: Mapping[str, Tensor], target: Tensor, frozen: bool) -> Tensor:
    """What takes the place of ``target``, or is copied to it. tensors: by the keys of `NAMES`."""
    values, scale = tensors["values"], tensors.get("scale")
    device = values.device if target.is_meta else target.device
    value: Any = values
    if scale is not None or (values.dtype.itemsize == 1 and target.is_floating_point()):
        memory = memory_of(name, values, scale, tensors.get("divisor"), device)
        value = ScaledTensor(memory, torch.float32)
    if value.shape != target.shape:
        file, in_model = tuple(value.shape), tuple(target.shape)
        raise ValueError(f"{name} has shape {file} in the checkpoint, {in_model} in the model")
    if isinstance(value, ScaledTensor):
        if frozen and isinstance(target, nn.Parameter):
            if target.dtype in DTYPES:
                return scaled_parameter(target, memory).requires_grad_(False)
            raise ValueError(f"{name} of {target.dtype} cannot be frozen in FP8: pass frozen=False")
        value = value.dequantize(target.dtype)
    return copied_parameter(target, value.to(target.dtype)) if target.is_meta else value
