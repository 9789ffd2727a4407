"""`export`: writes a model trained in low precision for serving in it, as Transformers, vLLM and
SGLang read it. `weights`: the same tensors, one at a time."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..casts.casting import whole_scale
from ..common.dtensor import is_dtensor, whole
from ..common.libraries import need
from ..common.mixin import bare_class
from ..common.report import LEFT_ALONE, Report, Row
from ..common.step import unwrapped
from ..common.validation import check_module
from ..layers.adapters import is_replacement
from ..layers.override import check_not_overridden
from ..layers.policies import bare_name
from ..layers.select import check_values_set, is_transposed
from ..recipes.cast import Cast
from ..recipes.history import histories, is_history
from ..training.lost_updates import LostUpdates
from .layouts import (
    INPUTS,
    LAYOUTS,
    Config,
    Entry,
    configuration,
    memory_of,
    misfit,
    stored,
    unfit,
)

__all__ = ["Weights", "weights"]


def export(model: nn.Module, folder: str | os.PathLike[str]) -> Report[Row]:
    """Writes ``model``, converted by `fp8.convert`, into ``folder`` for serving in low precision.

    A model of transformers gets the files of ``save_pretrained``. For other models,
    ``model.safetensors`` has the tensors under the names of the state_dict, and ``fp8.json`` the
    quantization_config and, in "tied", the names that share a tensor: other name -> name.

    The weight of a linear layer is stored as its recipe casts it; docs/export.md has the layouts
    and the scales of inputs. Everything else keeps its dtype. All processes of a sharded model
    (FSDP2, tensor parallelism) call it; the first one writes.

    Args:
        model: the converted model.
        folder: where to write; created if missing.

    Returns:
        A report with a row for each layer with a recipe: "FP8", or why it stays in high precision.

    Raises:
        TypeError: if ``model`` is not a module.
        ValueError: if nothing is in FP8, as of a "delayed" or "static" model that has not run;
            inside of `fp8.override`; for layers of another library; for what is in no weight: the
            factors of modules of `unit_scaling`, other transforms than ``unit_scale``, and that
            without a batch before its first call.
        ImportError: without safetensors.
    """
    check_module("export", model)
    need("safetensors")
    stream = weights(model)
    sharded = any(is_dtensor(p) for p in model.parameters())
    writes = not sharded or dist.get_rank() == 0
    tensors = {name: tensor.detach() for name, tensor in stream if writes}
    if writes:
        Path(folder).mkdir(parents=True, exist_ok=True)
        _write(stream, Path(folder), tensors)
    if sharded:  # the files are there when any process returns
        dist.barrier()
    return stream.report


def _write(
    stream: Weights,
    folder: Path,
    tensors: dict[str, Tensor],
) -> None:
    model: Any = stream.model
    if hasattr(model, "save_pretrained"):
        # Which leaves out the tied names that the model declares, and refuses others.
        tensors |= {name: tensors[first] for name, first in stream.tied.items()}
        model.save_pretrained(folder, state_dict=tensors)
        path = folder / "config.json"
        content = json.loads(path.read_text(encoding="utf-8"))
        content |= {"quantization_config": stream.config}
    else:
        path = folder / "fp8.json"
        whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
        need("safetensors").save_file(whole, folder / "model.safetensors")
        content = {"quantization_config": stream.config, "tied": stream.tied}
    text = json.dumps(content, indent=2, sort_keys=True)  # equal models, equal files
    path.write_text(f"{text}\n", encoding="utf-8")


def weights(model: nn.Module) -> Weights:
    """The tensors that `fp8.export` writes, for trainers that send them to an engine after each
    optimizer step (docs/export.md has an example).

    Args:
        model: converted by `fp8.convert`. It is not copied.

    Warns:
        RoundingWarning: at the end, if rounding removes most of what was merged into a weight.

    Raises:
        TypeError, ValueError: as `fp8.export`.
    """
    check_module("weights", model)
    return Weights(model)


class Weights:
    """Iterates over pairs (name, tensor), each time from the current values of the model.

    Names, dtypes and values are those of `fp8.export`, cast one at a time. A tensor that is not
    stored in low precision is the parameter itself, detached: copy it to keep it. A parameter under
    several names comes once. A sharded parameter (DTensor) is gathered when its turn comes: all
    processes of its mesh iterate together, to the end.

    Attributes:
        model: the model, without the wrappers of torch.compile and DistributedDataParallel.
        manifest: name -> shape and dtype of each tensor, in the order of iteration.
        tied: other name of a parameter -> its name in the manifest.
        config: the quantization_config.
        report: a row for each layer with a recipe, as `fp8.export` returns it.
    """

    manifest: dict[str, Entry]
    tied: dict[str, str]
    config: Config
    report: Report[Row]

    def __init__(self, model: nn.Module) -> None:
        self.model = model = unwrapped(model)
        check_not_overridden("export", model)
        modules = {bare_name(name): m for name, m in model.named_modules()}
        _check_plain(model)
        rows, self._layers = _layers(modules)
        if all(row.done == LEFT_ALONE for row in rows):
            whys = sorted({row.why for row in rows}) or ["fp8.convert was not called"]
            kind = bare_class(model).__name__
            raise ValueError(
                f"no layer of {kind} can be stored in FP8: {'; '.join(whys)}"
            )
        self.report = Report(rows)
        linear = [name for name, m in modules.items() if isinstance(m, nn.Linear)]
        ignore = [name for name in linear if name not in self._layers]
        self.config = configuration(self._layers, ignore)
        self.manifest, self.tied = {}, {}
        first: dict[int, str] = {}
        for name, (tensor, source) in state_of(model).items():
            first_name = first.setdefault(id(source), name)
            if first_name != name:
                self.tied[name] = first_name
            else:
                self.manifest |= self._entries(name, tensor)

    @property
    def nbytes(self) -> int:
        """The sum of bytes of all tensors."""
        return sum(entry.nbytes for entry in self.manifest.values())

    def __len__(self) -> int:
        return len(self.manifest)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        updates = LostUpdates()
        for name, (tensor, source) in state_of(self.model).items():
            if name not in self.tied:
                parts = self._stored(name, tensor)
                updates.add(name, source, partial(self._rounded, name, parts))
                yield from parts
        updates.warn()

    def _entries(
        self,
        name: str,
        tensor: Tensor,
    ) -> dict[str, Entry]:
        path, _, last = name.rpartition(".")
        layer = self._layers.get(path)
        if layer is None or last != "weight":
            return {name: Entry(tuple(tensor.shape), tensor.dtype)}
        recipe = layer.fp8_recipe
        parts = LAYOUTS[recipe.weight.scaling].entries(tensor.shape)
        if _has_input_scale(recipe):
            parts["input_scale"] = Entry((1,), torch.float32)
        return {f"{path}.{part}": entry for part, entry in parts.items()}

    @torch.no_grad()
    def _stored(
        self,
        name: str,
        tensor: Tensor,
    ) -> list[tuple[str, Tensor]]:
        """The tensors that are stored for one of the state_dict."""
        tensor = whole(tensor)
        path, _, last = name.rpartition(".")
        if last == "weight" and path in self._layers:
            parts = _parts(self._layers[path], tensor.float())
            return [(f"{path}.{part}", x) for part, x in parts.items()]
        return [(name, tensor)]

    def _rounded(self, name: str, parts: list[tuple[str, Tensor]]) -> Tensor:
        """The values that a reader computes from what `_stored` returned."""
        path = name.rpartition(".")[0]
        tensors = {key.removeprefix(f"{path}."): x for key, x in parts}
        values = tensors["weight"]
        if path not in self._layers:
            return values.float()
        layout = LAYOUTS[self._layers[path].fp8_recipe.weight.scaling]
        read = {"values": values, "scale": tensors[layout.scale]}
        return memory_of(name, read, layout.tile, values.device).numbers()


def state_of(model: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    """Name -> (the tensor in the state_dict, the parameter or buffer), without histories."""
    # Wrappers of modules may or may not take their part of a name out of the state_dict.
    state = {bare_name(name): tensor for name, tensor in model.state_dict().items()}
    parameters = model.named_parameters(remove_duplicate=False)
    buffers = model.named_buffers(remove_duplicate=False)
    named = ((bare_name(name), source) for name, source in (*parameters, *buffers))
    return {
        name: (state[name], source)
        for name, source in named
        if name in state and not is_history(name)
    }


def _check_plain(model: nn.Module) -> None:
    """Raises ValueError for a model that computes more than its weights say."""
    for name, module in model.named_modules():
        if type(module).__module__.startswith("unit_scaling.layers"):
            raise ValueError(
                f"{name} is a module of unit_scaling: its factors are in no weight. Make the model "
                "of torch's modules, and unit-scale it by unit_scaling.transforms.unit_scale"
            )
        for scope, _ in getattr(module, "_scopes", ()):
            kind = type(scope).__name__
            raise ValueError(f"{kind} is no part of the weights: export without it")
    check_values_set("export", model)


def _layers(modules: dict[str, nn.Module]) -> tuple[list[Row], dict[str, Any]]:
    """The rows of the report, and the layers to store in low precision."""
    uses = Counter(id(p) for m in modules.values() for p in m.parameters(recurse=False))
    rows, layers = [], dict[str, Any]()
    module: Any
    for name, module in modules.items():
        if is_replacement(module):
            raise ValueError(
                f"{name} is a layer of another library: fp8.revert the model first"
            )
        recipe = getattr(module, "fp8_recipe", None)
        if recipe is None:
            continue
        why = _why_not(name, module, uses) or unfit(recipe)
        if not why:
            first = next(iter(layers.values()), module).fp8_recipe
            layout, other = (LAYOUTS[r.weight.scaling] for r in (recipe, first))
            why = misfit(layout, module.weight.shape) or _no_history(module)
            if (layout.method, layout.format) != (other.method, other.format):
                used = other.format or other.method
                why = f"the file has layout {used!r} and no other: convert all layers to one recipe"
        done = LEFT_ALONE if why else "FP8"
        rows.append(Row(name, bare_class(module).__name__, done, why or recipe.name))
        if not why:
            layers[name] = module
    return rows, layers


def _why_not(
    name: str,
    module: Any,
    uses: Counter[int],
) -> str:
    """Why a layer cannot be stored under any recipe; "" if it can. uses: of each parameter."""
    if not isinstance(module, nn.Linear):
        kind = "transposed weights" if is_transposed(module) else "layers of this kind"
        return f"no layout has {kind}: it stays in high precision"
    if not name:
        return "the model itself: it has no name to be stored under; put it into nn.Sequential"
    if "weight" not in dict(module.named_parameters(recurse=False)):
        return (
            "its weight is computed, not a parameter: remove its parametrization first"
        )
    if uses[id(module.weight)] != 1:
        return "its weight is tied to another module's"
    return ""


def _no_history(layer: Any) -> str:
    """Why the scale of a layer's input is not known; "" if it is, or if the weight is zero."""
    cast = layer.fp8_recipe.input
    if not _has_input_scale(layer.fp8_recipe) or not cast.keeps_history:
        return ""
    if _history(layer, "input").any() or not whole(layer.weight.detach()).float().any():
        return ""
    how = "train the model" if cast.history else "calibrate or train the model"
    return (
        f"scaling {cast.scaling!r} has seen no input that is not all zeros: {how} first"
    )


def _has_input_scale(recipe: Any) -> bool:
    return INPUTS[recipe.input.scaling].get("dynamic") is False


def _parts(layer: Any, weight: Tensor) -> dict[str, Tensor]:
    """The tensors of a layer."""
    recipe = layer.fp8_recipe
    scale = None  # of the values
    if recipe.weight.scaling == "unit":
        scale = weight.new_ones(())  # whatever tag the weight has
    elif recipe.weight.keeps_history:
        scale = _known_scale(layer, weight, recipe.weight, "weight")
    layout = LAYOUTS[recipe.weight.scaling]
    tensors = stored(layout, weight, recipe.weight, scale)
    if _has_input_scale(recipe):
        scale = _known_scale(layer, weight.new_zeros(1), recipe.input, "input")
        tensors["input_scale"] = torch.atleast_1d(scale)
    return tensors


def _known_scale(
    layer: Any,
    x: Tensor,
    cast: Cast,
    role: str,
) -> Tensor:
    """The scale, 0-dim, of an operand by its history; without one, that of the values ``x``."""
    if cast.scaling == "unit":
        return x.new_ones(())
    scale = whole_scale(x, cast, _history(layer, role).reshape(-1), record=False)
    assert scale is not None
    return scale


def _history(layer: Any, role: str) -> Tensor:
    every = histories(layer).items()
    return next(tensor for name, tensor in every if name.endswith(role))
