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
from ..common.validation import check_choice, check_module
from ..layers.adapters import is_replacement
from ..layers.override import check_not_overridden
from ..layers.policies import bare_name
from ..layers.select import check_values_set, is_transposed
from ..recipes.cast import Cast
from ..recipes.history import history_of, is_history
from ..recipes.scaling import largest_finite
from ..training.lost_updates import LostUpdates
from .fusing import Target, is_of_expert, sharing, targets
from .layouts import LAYOUTS, Config, Entry, Layout
from .writing import (
    Encoded,
    configuration,
    encoded,
    layout_of,
    misfit,
    needs_input_scale,
    stored,
)

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

    The weight of a linear layer is stored as its recipe casts it; docs/export.md has the layouts
    and the scales of inputs. Everything else keeps its dtype. All processes of a sharded model
    (FSDP2, tensor parallelism) call it; the first one writes.

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

    def __init__(self, model: nn.Module, layout: str | None = None) -> None:
        self.model = model = unwrapped(model)
        check_not_overridden("export", model)
        modules = {bare_name(name): m for name, m in model.named_modules()}
        _check_plain(model)
        rows, self._layers, self._layouts = _layers(modules, layout)
        if not self._layers:
            whys = sorted({row.why for row in rows}) or ["fp8.convert was not called"]
            kind = bare_class(model).__name__
            raise ValueError(
                f"no layer of {kind} can be stored in FP8: {'; '.join(whys)}"
            )
        self.report = Report(rows)
        linear = [name for name, m in modules.items() if isinstance(m, nn.Linear)]
        ignore = [name for name in linear if name not in self._layers]
        self.config = configuration(self._layers, self._layouts, ignore)
        first_layout = next(iter(self._layouts.values()))
        self._fused = targets(dict.fromkeys(linear), first_layout)
        self._sharing = sharing(self._layers, first_layout)
        self.manifest, self.tied = {}, {}
        first: dict[int, str] = {}
        state = state_of(model)
        for name, (_, source) in state.items():
            first_name = first.setdefault(id(source), name)
            if first_name != name:
                self.tied[name] = first_name
        for target in self._fused.values():
            biased = [name for name in target.all if f"{name}.bias" in state]
            if biased and len(biased) < len(target.all):
                raise ValueError(
                    f"{target.path} has a bias in {', '.join(biased)} alone"
                )
        for name in state:
            if name not in self.tied:
                self.manifest |= self._entries(name, state)

    @property
    def nbytes(self) -> int:
        """The sum of bytes of all tensors."""
        return sum(entry.nbytes for entry in self.manifest.values())

    def __len__(self) -> int:
        return len(self.manifest)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        state = state_of(self.model)
        updates = LostUpdates()
        for name, (_, source) in state.items():
            if name not in self.tied:
                updates.add(name, source, partial(self._rounded, name, state))
                yield from self._stored(name, state)
        updates.warn()

    def _target(self, name: str) -> Target | None:
        """What an entry of the state_dict becomes; None: a part of what an earlier one becomes."""
        path, _, last = name.rpartition(".")
        target = Target(path, last, [[path]])
        fused = self._fused.get(path)
        if fused is None or last not in ("weight", "bias"):
            return target
        if path != fused.all[0]:
            return None
        stem = fused.stem
        if last == "bias":
            stem = stem.replace("weight", "bias")
        return fused._replace(stem=stem)

    def _is_low(self, target: Target) -> bool:
        """Whether the weight of a target is stored in low precision."""
        if not target.stem.endswith("weight"):
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
        state: dict[str, tuple[Tensor, Tensor]],
    ) -> dict[str, Entry]:
        target = self._target(name)
        if target is None:
            return {}
        path, last = target.path, name.rpartition(".")[2]
        parts = [state[_joined(layer, last)][0] for layer in target.layers[0]]
        shape = [*parts[0].shape]
        if len(parts) > 1:
            shape[0] = sum(part.shape[0] for part in parts)
        if target.of_experts:
            shape = [len(target.layers), *shape]
        if not self._is_low(target):
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
        state: dict[str, tuple[Tensor, Tensor]],
    ) -> list[tuple[str, Tensor]]:
        """The tensors that are stored for one of the state_dict."""
        target = self._target(name)
        if target is None:
            return []
        last = name.rpartition(".")[2]
        experts = [
            [whole(state[_joined(layer, last)][0]) for layer in parts]
            for parts in target.layers
        ]
        if self._is_low(target):
            found = self._parts(target, experts, state)
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
        state: dict[str, tuple[Tensor, Tensor]],
    ) -> dict[str, Tensor]:
        """The tensors of a weight in low precision."""
        name = target.all[0]
        layer, layout = self._layers[name], self._layouts[name]
        recipe = layer.fp8_recipe
        amax = self._amax(name, state)
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
        state: dict[str, tuple[Tensor, Tensor]],
    ) -> Tensor | None:
        """The largest magnitude of the layers whose scales have one unit; None without such."""
        if name not in self._sharing:
            return None
        largest = []
        for other in self._sharing[name]:
            weight = whole(state[_joined(other, "weight")][0]).float()
            largest.append(largest_finite(weight, None))
        return torch.stack(largest).amax()

    def _rounded(
        self,
        name: str,
        state: dict[str, tuple[Tensor, Tensor]],
    ) -> Tensor:
        """The values that a reader computes from what is stored of one of the state_dict."""
        weight = whole(state[name][0]).float()
        path, _, last = name.rpartition(".")
        if last != "weight" or path not in self._layers:
            return weight
        layout, amax = self._layouts[path], self._amax(path, state)
        return _encoded(self._layers[path], layout, weight, amax).numbers(layout)


def _joined(path: str, last: str) -> str:
    return f"{path}.{last}" if path else last


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


def _layers(
    modules: dict[str, nn.Module],
    name_of_layout: str | None,
) -> tuple[list[Row], dict[str, Any], dict[str, Layout]]:
    """The rows of the report, and the layers to store in low precision with their layouts."""
    uses = Counter(id(p) for m in modules.values() for p in m.parameters(recurse=False))
    rows, layers, layouts = [], dict[str, Any](), dict[str, Layout]()
    module: Any
    for name, module in modules.items():
        if is_replacement(module):
            raise ValueError(
                f"{name} is a layer of another library: fp8.revert the model first"
            )
        recipe = getattr(module, "fp8_recipe", None)
        if recipe is None:
            continue
        why = _why_not(name, module, uses)
        layout = layout_of(recipe, name_of_layout)
        if isinstance(layout, str):
            why = why or layout
        elif not why:
            why = misfit(layout, module.weight.shape) or _no_history(module, layout)
            other = next(iter(layouts.values()), layout)
            if (layout.method, layout.style) != (other.method, other.style):
                used = other.style or other.method
                why = f"the file has layout {used!r} and no other: convert all layers to one recipe"
            if layout.fused and not layout.experts and is_of_expert(name):
                raise ValueError(f"layout {layout.name!r} has no experts, as {name} is")
            if not why:
                layers[name], layouts[name] = module, layout
        done = LEFT_ALONE if why else "FP8"
        rows.append(Row(name, bare_class(module).__name__, done, why or recipe.name))
    return rows, layers, layouts


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


def _no_history(layer: Any, layout: Layout) -> str:
    """Why the scale of a layer's input is not known; "" if it is, or if the weight is zero."""
    cast = layer.fp8_recipe.input
    if not needs_input_scale(layer.fp8_recipe, layout) or not cast.keeps_history:
        return ""
    seen = history_of(layer, "input")
    assert seen is not None
    if seen.any() or not whole(layer.weight.detach()).float().any():
        return ""
    how = "train the model" if cast.history else "calibrate or train the model"
    return (
        f"scaling {cast.scaling!r} has seen no input that is not all zeros: {how} first"
    )


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
