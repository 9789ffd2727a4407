"""`export`: writes a model trained in FP8 for serving in FP8.

The layouts are those that Transformers and vLLM read: a weight in e4m3 under its own name, its
scales next to it, and a quantization_config. The layout of the library compressed-tensors,
"float-quantized", has ``weight_scale``, and ``input_scale`` if the scale of the input is known in
advance. The block layouts, "fp8" and "mxfp8", have ``weight_scale_inv``.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..casts.operands import static_exponent
from ..common.libraries import need
from ..common.mixin import check_module
from ..common.report import LEFT_ALONE, Report, Row
from ..formats.format import get_format
from ..formats.quantize import quantize_operand
from ..recipes.history import histories
from ..recipes.recipe import Cast, Recipe
from ..recipes.scaling import history_scale, scale_of, scaled_tiles
from ..selection.layers import is_transposed
from ..surgery.swap import is_replacement

__all__ = ["export"]

E4M3 = get_format("e4m3")
E8M0_BIAS = 127

_WEIGHTS = {
    "unit": "tensor",
    "tensor": "tensor",
    "delayed": "tensor",
    "static": "tensor",
    "row": "channel",
}
"""Scaling of a weight -> strategy of compressed-tensors."""

_INPUTS = {
    "unit": ("tensor", False),
    "delayed": ("tensor", False),
    "static": ("tensor", False),
    "tensor": ("tensor", True),
    "row": ("token", True),
}
"""Scaling of an input -> strategy, and whether its scale is computed at serving time."""


class _Blocks(NamedTuple):
    """A layout of Transformers' quantizer "fp8": tiles of a weight share a ``weight_scale_inv``."""

    method: str
    weight: tuple[int, int]
    """The tile of a weight, (outputs, inputs)."""
    input: tuple[int, int]
    """The tile of an input, (tokens, inputs), whose scale is computed at serving time."""
    fields: dict[str, Any]
    """Additional fields of the quantization_config."""

    def fits(self, shape: torch.Size) -> bool:
        """Whether a weight consists of full tiles, or of one partial tile: readers infer the tile
        size from the number of scales."""
        return all(n <= by or n % by == 0 for n, by in zip(shape, self.weight, strict=True))


BLOCKS = {
    "block": _Blocks("fp8", (128, 128), (1, 128), {"fmt": "e4m3"}),
    "mx": _Blocks("mxfp8", (1, 32), (1, 32), {"scale_fmt": "ue8m0"}),
}
"""Scaling of weight and input -> block layout: DeepSeek's, and MXFP8 with E8M0 bytes."""

ROUNDED = "rounded"
"""The report's word for a weight with FP8 values that is stored in high precision."""


@torch.no_grad()
def export(model: nn.Module, folder: str | os.PathLike[str]) -> Report[Row]:
    """Writes ``model``, converted by `fp8.convert`, into ``folder`` for serving in FP8.

    A model of the library transformers gets the files of ``save_pretrained``; ``from_pretrained``
    and vLLM read the folder. For other models, ``model.safetensors`` has the tensors of the
    state_dict under the same names, and ``fp8.json`` the quantization_config and, in "tied", the
    names that share a tensor with another one: name -> name.

    The weight of a linear layer is stored as e4m3 values, cast as its recipe does: the weight times
    ``weight_scale`` (float32; (1,), or (outputs, 1) for "row") is the layer's operand. For "block"
    and "mxfp8", ``weight_scale_inv`` has one value per 128 x 128 block (float32) or per 32 inputs
    (an E8M0 byte). Inputs need no calibration: their scale is 1 for "unit", from the history for
    "delayed", and that of the layer for "static". For other recipes it is computed at serving time
    from the largest magnitude, without rounding up to a power of two. Everything else keeps its
    dtype. No layout supports a linear layer with a transposed weight (GPT-2's): its weight is
    rounded as its recipe casts it and stored in high precision.

    For a unit-scaled model the files are those of the plain model, with the weights that
    init="preserve" has. With init="unit" its factors are folded into weights and scales as in
    `unit_scaling.transforms.fold`, after the model has run once; for E8M0 scales, which are powers
    of two, they are multiplied into the weight before its cast.

    Args:
        model: the converted model.
        folder: where to write; created if missing.

    Returns:
        A report with a row for each layer with a recipe: "FP8", "rounded", or left alone (in high
        precision), with the reason.

    Raises:
        TypeError: if ``model`` is not a module.
        ValueError: if nothing is in FP8; for layers of another library; for a "delayed" or "static"
            layer without a history; for factors that no weight can hold (modules of `unit_scaling`,
            and what `fold` rejects).
        ImportError: without safetensors.
    """
    check_module("export", model)
    need("safetensors")
    model = getattr(model, "_orig_mod", model)  # the module inside of a torch.compile wrapper
    factors, ratios = _factors(model)
    rows, layers = _layers(model)
    if all(row.done == LEFT_ALONE for row in rows):
        why = "; ".join(sorted({row.why for row in rows})) or "fp8.convert was not called"
        raise ValueError(f"no layer of {type(model).__name__} can be stored in FP8: {why}")
    state = model.state_dict()
    tensors = _plain(model, state, factors)
    for name, layer in layers.items():
        factor = factors.get(id(layer.weight), 1.0)
        weight = state[f"{name}.weight"].float()
        tensors |= _stored(name, layer, weight, factor, ratios.get(name, 1.0))
    for name in (row.path for row in rows if row.done == ROUNDED):
        layer, weight = model.get_submodule(name), state[f"{name}.weight"]
        units, scale, _ = _cast(name, layer, weight.float().t())
        values = units * scale * factors.get(id(layer.weight), 1.0)
        tensors[f"{name}.weight"] = values.t().to(weight.dtype).contiguous()
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    _write(model, folder, tensors, _config(model, layers) if layers else None)
    return Report(rows)


def _factors(model: nn.Module) -> tuple[dict[int, float], dict[str, float]]:
    """The factors that transforms removed from the model: id of a parameter or buffer -> the factor
    it lacks; layer -> the ratio of its input to the input in the plain model."""
    for name, module in model.named_modules():
        if type(module).__module__.startswith("unit_scaling.layers"):
            raise ValueError(
                f"{name} is a module of unit_scaling: its factors are in no weight. Make the model "
                "of torch's modules, and unit-scale it by unit_scaling.transforms.unit_scale"
            )
    names: dict[str, float] = {}
    ratios: dict[str, float] = {}
    for scope, _ in getattr(model, "_scopes", ()):
        if not hasattr(scope, "outside"):
            raise ValueError(f"{type(scope).__name__} is no part of the weights: export without it")
        weights, inputs = scope.outside(model)
        names |= weights
        ratios |= inputs
    known = _named(model)
    return {id(known[name]): factor for name, factor in names.items()}, ratios


def _named(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers under all their names."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {**parameters, **dict(model.named_buffers(remove_duplicate=False))}


def _layers(model: nn.Module) -> tuple[list[Row], dict[str, Any]]:
    """The rows of the report, and the layers to store in FP8."""
    uses: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    rows, layers = [], dict[str, Any]()
    for name, module in model.named_modules():
        if is_replacement(module):
            raise ValueError(f"{name} is a layer of another library: fp8.revert the model first")
        recipe = getattr(module, "fp8_recipe", None)
        if recipe is None:
            continue
        why = _why_not(name, module, uses) or _unfit(recipe)
        rounded = is_transposed(module) and not why
        method = _method(next(iter(layers.values())).fp8_recipe) if layers else _method(recipe)
        if not (why or rounded):
            why = _misfit(recipe, module.weight.shape, method)
        done = LEFT_ALONE if why else ROUNDED if rounded else "FP8"
        if rounded:
            why = "no layout has transposed weights: FP8's values in high precision"
        rows.append(Row(name, type(module).__name__, done, why or recipe.name))
        if done == "FP8":
            layers[name] = module
    return rows, layers


def _why_not(name: str, module: Any, uses: dict[int, int]) -> str:
    """Why a layer cannot be stored under any recipe; "" if it can. uses: number of uses per
    parameter."""
    if not (isinstance(module, nn.Linear) or is_transposed(module)):
        return "no layout has layers of this kind: it stays in high precision"
    if not name:
        return "the model itself: it has no name to be stored under; put it into nn.Sequential"
    if "weight" not in dict(module.named_parameters(recurse=False)):
        return "its weight is computed, not a parameter: remove its parametrization first"
    if uses.get(id(module.weight), 0) != 1:
        return "its weight is tied to another module's"
    return ""


def _method(recipe: Recipe) -> str:
    """The quant_method of the layout for a recipe."""
    blocks = BLOCKS.get(recipe.weight.scaling) if recipe.weight is not None else None
    return "compressed-tensors" if blocks is None else blocks.method


def _misfit(recipe: Recipe, shape: torch.Size, method: str) -> str:
    """Why a layer does not fit its layout, or that of the other layers; "" if it does."""
    blocks = None if recipe.weight is None else BLOCKS.get(recipe.weight.scaling)
    if _method(recipe) != method:
        return f"the file has layout {method!r} and no other: convert all layers to one recipe"
    if blocks is not None and not blocks.fits(shape):
        size = "x".join(map(str, blocks.weight))
        return f"its shape {tuple(shape)} is not made of whole {size} blocks: take recipe 'row'"
    return ""


def _unfit(recipe: Recipe) -> str:
    """Why the forward pass of a recipe has no layout; "" if it has one."""
    none = f"no layout for recipe {recipe.name!r}"
    then = "convert the model to 'tensor', 'row', 'block' or 'mxfp8' first"
    weight, input = recipe.weight, recipe.input
    blocks = BLOCKS.get(weight.scaling) if weight is not None else None
    if weight is None or input is None or (blocks is not None and input.scaling != weight.scaling):
        return f"{none}: {then}"
    for cast, known in ((weight, _WEIGHTS), (input, _INPUTS)):
        if blocks is None and cast.scaling not in known:
            return f"{none}: {then}"
        tile = None if blocks is None else blocks.weight if cast is weight else blocks.input
        usual = Cast(
            format="e4m3",
            scaling=cast.scaling,
            rule=cast.rule,
            history=cast.history or None,
            tile=tile,
        )
        if cast != usual:
            return f"{none}: {cast}; {then}"
    return ""


def _plain(
    model: nn.Module, state: dict[str, Tensor], factors: dict[int, float]
) -> dict[str, Tensor]:
    """The parameters and buffers without histories, with factors multiplied in and ties kept."""
    known, named = histories(model), _named(model)
    tensors = {n: t for n, t in state.items() if n in named and n not in known}
    scaled: dict[int, Tensor] = {}
    for name in tensors:
        key = id(named[name])
        if key in factors:
            tensors[name] = scaled.setdefault(key, state[name] * factors[key])
    return tensors


def _cast(name: str, layer: Any, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A weight (outputs, inputs) divided by its scales; the scales, broadcast to the weight; and
    the scales, one per tile."""
    cast = layer.fp8_recipe.weight
    blocks = BLOCKS.get(cast.scaling)
    if blocks is None:
        grid = scale = _scale(name, weight, cast, histories(layer), "weight")
        if cast.scaling == "unit":
            grid = scale = scale * 2.0 ** static_exponent(layer.weight)
    else:
        tiles, dims = scaled_tiles(weight, blocks.weight, -1)
        shape = [-(-n // by) for n, by in zip(weight.shape, blocks.weight, strict=True)]
        grid = scale_of(tiles, dims, E4M3, cast.rule).reshape(shape)
        wide = grid.repeat_interleave(blocks.weight[0], 0).repeat_interleave(blocks.weight[1], 1)
        scale = wide[: weight.shape[0], : weight.shape[1]]
    how: Any = {"rounding": "nearest", "overflow": "saturate", "random_bits": 31}
    return quantize_operand(weight, E4M3, scale=scale, **how) / scale, scale, grid


def _stored(
    name: str, layer: Any, weight: Tensor, factor: float, ratio: float
) -> dict[str, Tensor]:
    """The tensors of a layer in FP8, by name. factor: missing in ``weight``. ratio: of its input to
    the input at serving time."""
    recipe = layer.fp8_recipe
    if recipe.weight.scaling == "mx":  # its scales are powers of two
        weight, factor = weight * factor, 1.0
    units, _, scale = _cast(name, layer, weight)
    stored = {f"{name}.weight": units.to(E4M3.dtype).contiguous()}
    if recipe.weight.scaling == "mx":
        stored[f"{name}.weight_scale_inv"] = (scale.log2() + E8M0_BIAS).to(torch.uint8)
    elif recipe.weight.scaling == "block":
        stored[f"{name}.weight_scale_inv"] = scale * factor
    else:
        stored[f"{name}.weight_scale"] = torch.atleast_1d(scale * factor)
        if not _INPUTS[recipe.input.scaling][1]:
            scale = _scale(name, weight, recipe.input, histories(layer), "input")
            stored[f"{name}.input_scale"] = torch.atleast_1d(scale / ratio)
    return stored


def _scale(name: str, x: Tensor, cast: Cast, known: dict[str, Tensor], role: str) -> Tensor:
    """The scale: 0-dim, or (rows, 1) for one per row of ``x``. known: the histories of the
    layer."""
    if cast.scaling == "unit":
        return x.new_ones(())
    if not cast.keeps_history:
        dims, rule = (-1,) if cast.scaling == "row" else None, cast.rule
        assert rule is not None
        return scale_of(x, dims, E4M3, rule)
    history = next(tensor for name, tensor in known.items() if name.endswith(role))
    if not bool(history.any()):
        how = "train the model" if cast.history else "calibrate or train the model"
        raise ValueError(f"{name} has scaling {cast.scaling!r} and no history yet: {how} first")
    return history_scale(x, history, E4M3, cast.rule, cast.margin, False)


def _config(model: nn.Module, layers: dict[str, Any]) -> dict[str, Any]:
    """The quantization_config; for compressed-tensors, with a group for each pair of strategies."""
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    ignore = [name for name in linear if name not in layers]
    blocks = BLOCKS.get(next(iter(layers.values())).fp8_recipe.weight.scaling)
    if blocks is not None:
        return {
            "quant_method": blocks.method,
            "activation_scheme": "dynamic",
            "weight_block_size": list(blocks.weight),
            "modules_to_not_convert": ignore,
            **blocks.fields,
        }
    groups: dict[tuple[str, str], list[str]] = {}
    for name, layer in layers.items():
        recipe = layer.fp8_recipe
        groups.setdefault((recipe.weight.scaling, recipe.input.scaling), []).append(name)
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "ignore": ignore,
        "config_groups": {
            f"group_{i}": {
                "targets": ["Linear"] if len(groups) == 1 else names,
                "weights": _arguments(_WEIGHTS[weight], False),
                "input_activations": _arguments(*_INPUTS[input]),
                "output_activations": None,
            }
            for i, ((weight, input), names) in enumerate(groups.items())
        },
    }


def _arguments(strategy: str, dynamic: bool) -> dict[str, Any]:
    given = {"num_bits": 8, "type": "float", "symmetric": True}
    return {**given, "strategy": strategy, "dynamic": dynamic}


def _write(
    model: Any, folder: Path, tensors: dict[str, Tensor], config: dict[str, Any] | None
) -> None:
    """Writes the files. config: the quantization_config; None if nothing is stored in FP8."""
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(folder, state_dict=tensors)
        path = folder / "config.json"
        content = json.loads(path.read_text(encoding="utf-8"))
        content |= {} if config is None else {"quantization_config": config}
    else:
        path = folder / "fp8.json"
        tied = _tied(tensors)
        whole = {name: t.contiguous() for name, t in tensors.items() if name not in tied}
        need("safetensors").save_file(whole, folder / "model.safetensors")
        content = {"quantization_config": config, "tied": tied}
    text = json.dumps(content, indent=2, sort_keys=True) + "\n"
    path.write_text(text, encoding="utf-8")


def _tied(tensors: dict[str, Tensor]) -> dict[str, str]:
    """Name of a tensor that occurred before under another name -> that name."""
    first: dict[Any, str] = {}
    tied = {}
    for name, tensor in tensors.items():
        known = first.setdefault((tensor.data_ptr(), tensor.shape, tensor.stride()), name)
        if known != name and tensor.numel():
            tied[name] = known
    return tied
