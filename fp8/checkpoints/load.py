"""`load`: reads a checkpoint in low precision into a model."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..casts.scaled_tensor import DTYPES, ScaledTensor
from ..common.dtensor import is_dtensor
from ..common.libraries import need
from ..common.mixin import bare_class
from ..common.step import unwrapped
from ..common.validation import check_module
from ..layers.convert import check_ready
from ..layers.policies import bare_name
from ..layers.select import check_values_set
from ..recipes.history import is_history
from ..recipes.scaling import Tile
from ..training.lost_updates import remember
from ..training.stored_weights import copied_parameter, replace, scaled_parameter
from .chosen import state_of
from .joining import Checkpoint, as_state
from .layouts import Config
from .reading import names_in
from .stacks import oriented

M = TypeVar("M", bound=nn.Module)

Source = str | os.PathLike[str] | Mapping[str, Tensor]

# Last parts of the names of scales of activations and caches, which are left in the file: casts
# compute their own.
OF_ACTIVATIONS = (
    "input_scale",
    "input_scale_ub",
    "input_global_scale",
    "activation_scale",
    "output_scale",
    "q_scale",
    "k_scale",
    "v_scale",
)


def load(
    model: M,
    source: Source,
    *,
    frozen: bool = True,
    config: Config | None = None,
    unscaled: bool = False,
) -> M:
    """Loads a checkpoint in low precision into ``model``, in place.

    Reads what `fp8.export` writes, and the files of model hubs (docs/resume.md lists their
    layouts). A weight is ``values * scale`` in float32, rounded once to the dtype of its parameter.
    Which values share a scale is what the configuration of the file says; what it does not say
    follows from the shapes, if they admit one answer. Scales of activations are left in the file.
    Names are those of the model's state_dict, or those that transformers gives its tensors in
    files, with a weight for each expert; of tied names one is enough.

    Args:
        model: plain or converted, changed in place. Parameters on the meta device get the memory of
            the file.
        source: a safetensors file; a folder with ``model.safetensors`` or its index; or a
            state_dict, whose tensors are copied. The folder's config.json or fp8.json has the
            quantization_config.
        frozen: True makes each weight in low precision a `ScaledTensor` with the values and scales
            of the file, one byte a value, which does not require a gradient, as by
            `fp8.store_frozen`: add adapters and make optimizers after it. False gives all
            parameters in high precision, in the dtypes that they have.
        config: a quantization_config, which replaces the one in the folder.
        unscaled: whether FP8 values without a scale are the numbers themselves, as of
            ``weight.to(torch.float8_e4m3fn)``.

    Returns:
        ``model``.

    Raises:
        ValueError: for missing and unexpected names, missing scales, scales that do not have the
            configured blocks or fit several, another shape, weights stored otherwise than in FP8 or
            FP4, unlike tensors of tied names, and shards. Nothing has changed then.
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
    if frozen:
        check_values_set("load(frozen=True)", model)
    checkpoint = _read(source, config)._replace(unscaled=unscaled)
    inner = unwrapped(model)
    targets = {name: target for name, (_, target) in state_of(inner).items()}
    checkpoint = as_state(inner, targets, checkpoint)
    tensors, other = checkpoint.tensors, checkpoint.other
    read = partial(names_in, tensors, targets=targets)
    found = {name: read(name) or read(other.get(name, "")) for name in targets}
    names = {name: parts for name, parts in found.items() if parts}
    named = inner.named_modules(remove_duplicate=False)
    modules = {bare_name(path): module for path, module in named}
    full = {bare_name(name): name for name in inner.state_dict()}
    extra = {name for name in full.keys() - targets.keys() if not is_history(name)}
    _check(inner, targets, names, tensors, extra)
    new: dict[Tensor, Tensor] = {}
    state = {name: tensors[name] for name in extra if name in tensors}
    for name, parts in names.items():
        target = targets[name]
        if target not in new:
            layer = modules[name.rpartition(".")[0]]
            value = _value(name, parts, checkpoint, layer, target, frozen)
            if isinstance(value, ScaledTensor) or target.is_meta:
                new[target] = value
            else:
                state[name] = value
    replace(inner, new)
    state = {full[name]: value for name, value in state.items()}
    inner.load_state_dict(state, strict=False)
    return model


def _read(source: Source, config: Config | None) -> Checkpoint:
    if not isinstance(config, Mapping | None):
        kind = type(config).__name__
        raise TypeError(
            f"config is a quantization_config as a dict or None, not a {kind}"
        )
    if isinstance(source, Mapping):
        return _parts_of(source, config or {})
    if not isinstance(source, str | os.PathLike):
        raise TypeError(
            f"load reads a path or a state_dict, not a {type(source).__name__}"
        )
    path = Path(source)
    files = files_of(path)
    about = description(path)
    if config is None:
        config = about.get("quantization_config")
    load_file = need("safetensors").load_file
    tensors = {name: t for file in files for name, t in load_file(file).items()}
    return Checkpoint(tensors, config or {}, about.get("tied", {}))


def files_of(path: Path) -> list[Path]:
    """The safetensors files of a checkpoint. path: one of them, or a folder. Raises ValueError for
    a file that is not there."""
    files = [path]
    if path.is_dir():
        # The index of a file in shards, as Hugging Face's libraries write it.
        index = path / "model.safetensors.index.json"
        files = [path / "model.safetensors"]
        if index.exists():
            shards = _json(index)["weight_map"].values()
            files = [path / shard for shard in sorted(set(shards))]
    if absent := [file for file in files if not file.is_file()]:
        raise ValueError(f"load found no file {absent[0]}")
    return files


def description(path: Path) -> Config:
    """What config.json and fp8.json say, in the folder of a checkpoint."""
    folder = path if path.is_dir() else path.parent
    about: Config = {}
    for file in (folder / "config.json", folder / "fp8.json"):
        if file.exists():
            about |= _json(file)
    return about


def _json(file: Path) -> Config:
    return json.loads(file.read_text(encoding="utf-8"))


def _parts_of(state: Mapping[str, Any], config: Config) -> Checkpoint:
    """Copies of the plain tensors that a state_dict consists of, under their names in files."""
    parts: dict[str, Tensor] = {}
    tiles: dict[str, Tile] = {}
    for name, x in state.items():
        path, dot, last = name.rpartition(".")
        if isinstance(x, ScaledTensor):
            # A view does not know which scales are those of its values.
            if x.scale is not None and x.is_whole() and x.stored.itemsize == 1:
                parts |= {name: x.stored, f"{name}_scale": x.scale}
                tiles[name] = x.memory.tile or (0, 0)
            else:
                parts[name] = x.dequantize()
        # torchao's, by name, as the library need not be installed.
        elif type(x).__name__ == "Float8Tensor":
            stem = f"{path}{dot}_{last}"
            parts |= {f"{stem}_qdata": x.qdata, f"{stem}_scale": x.scale}
            if x.scale.numel() > 1:
                tiles[f"{stem}_qdata"] = (x.block_size[-2], x.block_size[-1])
        elif type(x) in (Tensor, nn.Parameter):
            parts[name] = x
        elif isinstance(x, Tensor):
            kind = type(x).__name__
            raise ValueError(
                f"{name} is a {kind}, which load cannot read: dequantize it before"
            )
    copies = {name: x.detach().clone() for name, x in parts.items()}
    return Checkpoint(copies, config, tiles=tiles)


def _check(
    model: nn.Module,
    targets: Mapping[str, Tensor],
    names: Mapping[str, Mapping[str, str]],
    tensors: Mapping[str, Tensor],
    extra: Collection[str],
) -> None:
    """Raises the ValueErrors of `load` that concern names, ties, shards and meta buffers."""
    first: dict[int, str] = {}
    for name, parts in names.items():
        other = first.setdefault(id(targets[name]), name)
        if other == name:  # also with NaN, which is not equal to itself
            continue
        theirs = names[other]
        both = parts.keys() & theirs.keys()
        equal = (
            tensors[parts[p]].float().equal(tensors[theirs[p]].float()) for p in both
        )
        if parts.keys() != theirs.keys() or not all(equal):
            raise ValueError(
                f"{other} and {name} are one parameter, with unlike tensors here"
            )
    known = {*OF_ACTIVATIONS, *extra}
    for parts in names.values():
        known.update(parts.values())
    missing = [name for name, target in targets.items() if id(target) not in first]
    unexpected = [k for k in tensors if not {k, k.rpartition(".")[2]} & known]
    differ = {"missing": missing, "unexpected": unexpected}
    texts = [f"{what}: {', '.join(keys)}" for what, keys in differ.items() if keys]
    if texts:
        raise ValueError(
            f"the checkpoint and {type(model).__name__} have other names: "
            + "; ".join(texts)
        )
    if divided := [name for name, target in targets.items() if is_dtensor(target)]:
        raise ValueError(f"processes divide {divided[0]}: load before fully_shard")
    for name, buffer in model.named_buffers():
        if buffer.is_meta and bare_name(name) not in targets:
            raise ValueError(
                f"{name} is on the meta device and in no checkpoint: give it memory"
            )


def _value(
    name: str,
    parts: Mapping[str, str],
    checkpoint: Checkpoint,
    layer: nn.Module,
    target: Tensor,
    frozen: bool,
) -> Tensor:
    """What takes the place of ``target``, or is copied to it. layer: the module that has it."""
    value: Any = checkpoint.tensors[parts["values"]]
    device = value.device if target.is_meta else target.device
    if checkpoint.is_low(parts, target.dtype):
        memory = checkpoint.memory(name, parts, bare_class(layer), device)
        if value.dim() > target.dim():  # blocks, of (experts, outputs, inputs)
            memory = oriented(layer, memory)
        value = ScaledTensor(memory, torch.float32)
    if value.shape != target.shape:
        file, in_model = tuple(value.shape), tuple(target.shape)
        raise ValueError(
            f"{name} has shape {file} in the checkpoint, {in_model} in the model"
        )
    if isinstance(value, ScaledTensor):
        if frozen and isinstance(target, nn.Parameter):
            if target.dtype in DTYPES:
                return scaled_parameter(target, memory).requires_grad_(False)
            raise ValueError(
                f"{name} of {target.dtype} cannot be frozen in FP8: pass frozen=False"
            )
        value = value.dequantize(target.dtype)
        remember(target, value)
    if target.is_meta:
        return copied_parameter(target, value.to(target.dtype))
    return value
