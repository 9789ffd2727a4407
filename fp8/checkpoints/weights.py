"""`export`: writes a model trained in low precision for serving in it, as Transformers, vLLM and
SGLang read it. `weights`: the same tensors, one at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..casts.casting import whole_scale
from ..common.dtensor import is_dtensor
from ..common.libraries import need
from ..common.mixin import bare_class
from ..common.report import Report, Row
from ..common.step import unwrapped
from ..common.validation import check_choice, check_module
from ..layers.override import check_not_overridden
from ..recipes.cast import Cast
from ..recipes.history import history_of
from ..recipes.scaling import largest_finite
from ..training.lost_updates import LostUpdates
from .chosen import Values, chosen, state_of
from .fusing import Target, of_one_expert, of_stack, sharing, targets
from .layouts import LAYOUTS, Config, Entry, Layout
from .stacks import as_outputs
from .writing import Encoded, configuration, encoded, needs_input_scale, stored

__all__ = ["Weights", "weights"]


def export(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    layout: str | None = None,
) -> Report[Row]:
    """Writes ``model``, converted by `fp8.convert`, into ``folder`` for serving in low precision.

    A model of transformers gets the files of ``save_pretrained``. For other models,
    ``model.safetensors`` has the tensors under the names of the state_dict, and ``fp8.json`` the
    quantization_config and, in "tied", the names that share a tensor: other name -> name.

    The weights of linear layers and of experts are stored as their recipes cast them;
    docs/export.md has the layouts and the scales of inputs. Everything else keeps its dtype. All
    processes of a sharded model (FSDP2, tensor parallelism) call it; the first one writes.

    Args:
        model: the converted model.
        folder: where to write; created if missing.
        layout: a name in `fp8.checkpoints.layouts.LAYOUTS` with place "file". None: for each layer
            the first one that has its recipe.

    Returns:
        A report with a row for each layer with a recipe: "FP8", or why it stays in high precision.

    Raises:
        TypeError: if ``model`` is not a module.
        ValueError: if nothing is in FP8, as of a "delayed" or "static" model that has not run; for
            an unknown layout, and recipes that it does not have; inside of `fp8.override`; for
            layers of another library; for what is in no weight: the factors of modules of
            `unit_scaling`, other transforms than ``unit_scale``, and that without a batch before
            its first call.
        ImportError: without safetensors.
    """
    check_module("export", model)
    need("safetensors")
    files = [name for name, row in LAYOUTS.items() if row.place == "file"]
    if layout is not None:
        check_choice("layout of files", layout, files)
    stream = weights(model, layout=layout)
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
        state = stream.as_state(tensors)
        # Which leaves out the tied names that the model declares, and refuses others.
        state |= {name: tensors[first] for name, first in stream.tied.items()}
        model.save_pretrained(folder, state_dict=state)
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


def weights(model: nn.Module, *, layout: str | None = None) -> Weights:
    """The tensors that `fp8.export` writes, for trainers that send them to an engine after each
    optimizer step (docs/export.md has an example).

    Args:
        model: converted by `fp8.convert`. It is not copied.
        layout: a name in `fp8.checkpoints.layouts.LAYOUTS`. None: for each layer the first one for
            files that has its recipe. Those with place "memory" are the parameters of an engine on
            one device, under its names, where it fuses layers.

    Warns:
        RoundingWarning: at the end, if rounding removes most of what was merged into a weight.

    Raises:
        TypeError, ValueError: as `fp8.export`.
    """
    check_module("weights", model)
    if layout is not None:
        check_choice("layout", layout, LAYOUTS)
    return Weights(model, layout)


class Weights:
    """Iterates over pairs (name, tensor), each time from the current values of the model.

    Names, dtypes and values are those of the files of `fp8.export`, cast one at a time. A tensor
    that is not stored in low precision is the parameter itself, detached: copy it to keep it. A
    parameter under several names comes once. A sharded parameter (DTensor) is gathered when its
    turn comes: all processes of its mesh iterate together, to the end.

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

    def __init__(self, model: nn.Module, layout: str | None = None) -> None:
        self.model = model = unwrapped(model)
        check_not_overridden("export", model)
        state = state_of(model)
        self._chosen = found = chosen(model, state, layout)
        self._layers, self._layouts = found.layers, found.layouts
        self.report = Report(found.rows)
        if not self._layers:
            default = ["fp8.convert was not called"]
            whys = sorted({row.why for row in found.rows}) or default
            kind = bare_class(model).__name__
            raise ValueError(
                f"no layer of {kind} can be stored in FP8: {'; '.join(whys)}"
            )
        self.config = configuration(self._layers, self._layouts, found.ignored)
        first_layout = next(iter(self._layouts.values()))
        # Layers in high precision, too, of which none may be a part of one in low precision.
        names = dict.fromkeys([*self._layers, *found.ignored])
        self._fused = targets(names, first_layout)
        self._sharing = sharing(self._layers, first_layout)
        values = Values(state, found, is_meta=True)
        for stack, parts in found.parts.items():
            if first_layout.stacked:
                self._fused |= dict.fromkeys(parts, of_stack(stack, parts))
            elif values[stack].dim() == 3:
                self._sharing |= of_one_expert(parts)
            else:
                self._sharing |= dict.fromkeys(parts, parts)
        self.manifest, self.tied = {}, {}
        first: dict[int, str] = {}
        self._names = {name: name for name in values.state} | found.names
        for name, (_, source) in values.state.items():
            first_name = first.setdefault(id(source), self._names[name])
            if first_name != self._names[name]:
                self.tied[name] = first_name
        for target in self._fused.values():
            biased = [name for name in target.all if f"{name}.bias" in values.state]
            if biased and len(biased) < len(target.all):
                raise ValueError(
                    f"{target.path} has a bias in {', '.join(biased)} alone"
                )
        for name in values.state:
            if name not in self.tied:
                for part in found.weights_of(name):
                    self.manifest |= self._entries(part, values)

    def as_state(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of the stream under the names of the state_dict, where it has them."""
        in_state = {in_file: name for name, in_file in self._names.items()}
        return {in_state.get(name, name): x for name, x in tensors.items()}

    @property
    def nbytes(self) -> int:
        """The sum of bytes of all tensors."""
        return sum(entry.nbytes for entry in self.manifest.values())

    def __len__(self) -> int:
        return len(self.manifest)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        values = Values(state_of(self.model), self._chosen)
        updates = LostUpdates()
        for name, (_, source) in values.state.items():
            if name not in self.tied:
                updates.add(name, source, partial(self._rounded, name, values))
                for part in self._chosen.weights_of(name):
                    yield from self._stored(part, values)
        updates.warn()

    def _target(self, name: str) -> Target | None:
        """What an entry of the state_dict becomes; None: a part of what an earlier one becomes."""
        path, _, last = name.rpartition(".")
        in_file, _, stem = self._names.get(name, name).rpartition(".")
        target = Target(in_file, stem, [[path]])
        fused = self._fused.get(path)
        if fused is None or last not in ("weight", "bias"):
            return target
        if path != fused.all[0]:
            return None
        if last == "bias":
            return fused._replace(stem=fused.stem.replace("weight", "bias"))
        return fused

    def _is_low(self, target: Target, last: str) -> bool:
        """Whether a target is stored in low precision. last: part of the names of its layers'."""
        if last != "weight":
            return False
        casts = {}
        for name in target.all:
            layer = self._layers.get(name)
            casts[name] = None if layer is None else layer.fp8_recipe.weight
        first, *others = casts
        for other in others:
            if casts[other] != casts[first]:
                raise ValueError(
                    f"{target.path} has {first} and {other} under unlike casts "
                    f"({casts[first] or 'none'}, {casts[other] or 'none'}): give both one recipe"
                )
        return casts[first] is not None

    def _entries(
        self,
        name: str,
        values: Values,
    ) -> dict[str, Entry]:
        target = self._target(name)
        if target is None:
            return {}
        path, last = target.path, name.rpartition(".")[2]
        parts = [values[_joined(layer, last)] for layer in target.layers[0]]
        shape = [*parts[0].shape]
        if len(parts) > 1:
            shape[0] = sum(part.shape[0] for part in parts)
        if target.of_experts:
            shape = [len(target.layers), *shape]
        if not self._is_low(target, last):
            entry = Entry(tuple(shape), parts[0].dtype)
            return {_joined(path, target.stem): entry}
        layer = self._layers[target.all[0]]
        layout = self._layouts[target.all[0]]
        found = {}
        for part, entry in layout.entries(torch.Size(shape)).items():
            found[layout.forms[part].format(target.stem)] = entry
        if needs_input_scale(layer.fp8_recipe, layout):
            found["input_scale"] = Entry((1,), torch.float32)
        return {_joined(path, part): entry for part, entry in found.items()}

    @torch.no_grad()
    def _stored(
        self,
        name: str,
        values: Values,
    ) -> list[tuple[str, Tensor]]:
        """The tensors that are stored for one of the state_dict."""
        target = self._target(name)
        if target is None:
            return []
        last = name.rpartition(".")[2]
        experts = [
            [values[_joined(layer, last)] for layer in parts] for parts in target.layers
        ]
        if self._is_low(target, last):
            found = self._parts(target, experts, values)
        elif target.of_experts:
            each = [torch.cat(parts) for parts in experts]
            found = {target.stem: torch.stack(each)}
        elif len(target.all) > 1:
            found = {target.stem: torch.cat(experts[0])}
        else:
            found = {target.stem: experts[0][0]}
        return [(_joined(target.path, part), x) for part, x in found.items()]

    def _parts(
        self,
        target: Target,
        experts: list[list[Tensor]],
        values: Values,
    ) -> dict[str, Tensor]:
        """The tensors of a weight in low precision."""
        name = target.all[0]
        layer, layout = self._layers[name], self._layouts[name]
        recipe = layer.fp8_recipe
        amax = self._amax(name, values)
        each = []
        for parts in experts:
            weight = parts[0] if len(parts) == 1 else torch.cat(parts)
            each.append(_encoded(layer, layout, weight.float(), amax))
        tensors = stored(layout, each, target.stem, target.of_experts)
        if needs_input_scale(recipe, layout):
            scale = _known_scale(
                layer, each[0].values.new_zeros(1), recipe.input, "input"
            )
            tensors["input_scale"] = torch.atleast_1d(scale)
        return tensors

    def _amax(
        self,
        name: str,
        values: Values,
    ) -> Tensor | None:
        """The largest magnitude of the layers whose scales have one unit; None without such."""
        if name not in self._sharing:
            return None
        largest = []
        for other in self._sharing[name]:
            weight = values[_joined(other, "weight")].float()
            largest.append(largest_finite(weight, None))
        return torch.stack(largest).amax()

    def _rounded(
        self,
        name: str,
        values: Values,
    ) -> Tensor:
        """The values that a reader computes from what is stored of one of the state_dict."""
        if name in self._chosen.parts:
            return self._rounded_stack(name, values)
        weight = values[name].float()
        path, _, last = name.rpartition(".")
        if last != "weight" or path not in self._layers:
            return weight
        layout, amax = self._layouts[path], self._amax(path, values)
        return _encoded(self._layers[path], layout, weight, amax).numbers(layout)

    def _rounded_stack(self, name: str, values: Values) -> Tensor:
        first = self._chosen.parts[name][0]
        experts, layout = self._layers[first], self._layouts[first]
        stack = values[name].float()
        if stack.dim() == 2:
            return _encoded(experts, layout, stack, None).numbers(layout)
        each = as_outputs(experts, stack)
        found = [_encoded(experts, layout, x, None).numbers(layout) for x in each]
        return as_outputs(experts, torch.stack(found))


def _joined(path: str, last: str) -> str:
    return f"{path}.{last}" if path else last


def _encoded(
    layer: Any,
    layout: Layout,
    weight: Tensor,
    amax: Tensor | None,
) -> Encoded:
    cast = layer.fp8_recipe.weight
    scale = None  # of the values
    if cast.scaling == "unit":
        scale = weight.new_ones(())  # whatever tag the weight has
    elif cast.keeps_history:
        scale = _known_scale(layer, weight, cast, "weight")
    return encoded(layout, weight, cast, scale, amax)


def _known_scale(
    layer: Any,
    x: Tensor,
    cast: Cast,
    role: str,
) -> Tensor:
    """The scale, 0-dim, of an operand by its history; without one, that of the values ``x``."""
    if cast.scaling == "unit":
        return x.new_ones(())
    history = history_of(layer, role)
    assert history is not None
    scale = whole_scale(x, cast, history.reshape(-1), record=False)
    assert scale is not None
    return scale
