"""`export`: a model that was trained in FP8, written for those who serve it in FP8.

The layout is that of the library compressed-tensors, format "float-quantized", which Transformers
and vLLM read: a weight in e4m3 under its own name, ``weight_scale`` beside it, ``input_scale``
where the scale of the input is known beforehand, and a quantization_config.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .adapters import need
from .formats import get_format
from .history import histories
from .operands import static_exponent
from .quantize import quantize_operand
from .recipe import Cast, Recipe
from .report import LEFT_ALONE, Report, Row
from .scaling import delayed_scale, scale_of
from .subclass import check_module
from .swap import is_replacement

__all__ = ["export"]

E4M3 = get_format("e4m3")

_WEIGHTS = {"unit": "tensor", "tensor": "tensor", "delayed": "tensor", "row": "channel"}
"""Scaling of a weight -> compressed-tensors' strategy."""

_INPUTS = {
    "unit": ("tensor", False),
    "delayed": ("tensor", False),
    "tensor": ("tensor", True),
    "row": ("token", True),
}
"""Scaling of an input -> strategy, and whether its scale is found when it is served."""


@torch.no_grad()
def export(model: nn.Module, folder: str | os.PathLike[str]) -> Report[Row]:
    """Writes ``model``, whose layers run in FP8 by `fp8.convert`, into ``folder`` for serving.

    A model of the library transformers gets the files of its ``save_pretrained``, and
    ``from_pretrained`` or vLLM read the folder. Of any other, ``model.safetensors`` has the tensors
    of its state_dict, under the same names, and ``fp8.json`` the quantization_config and, in
    "tied", the names that share a tensor with another: name -> name.

    The weight of a linear layer is stored as e4m3 numbers, as its recipe casts them: weight times
    ``weight_scale`` (float32; (1,), or (outputs, 1) for "row") is what the layer multiplied by.
    Inputs need no calibration: their scale is 1 for "unit" and that of the history for "delayed";
    for "tensor" and "row" it follows, when served, from the largest magnitude at hand, without
    being rounded up to a power of two. All else keeps its dtype.

    Of a unit-scaled model the files are those of the plain one, whose weights init="preserve" has.
    With init="unit" its factors go into weights and scales as `unit_scaling.transforms.fold` says,
    for decoders built as Llama's that have run once.

    Returns a row for each layer with a recipe: "FP8", or left alone, in high precision, and why.
    Raises TypeError for what is not a module, ValueError where no layer can be in FP8, for layers
    of another library, for a "delayed" layer without a history, and for a model with factors that
    no weight can hold (modules of `unit_scaling`, other unit-scaled models); ImportError without
    safetensors.
    """
    check_module("export", model)
    need("safetensors")
    model = getattr(model, "_orig_mod", model)  # what torch.compile wrapped
    factors, ratios = _factors(model)
    rows, layers = _layers(model)
    if not layers:
        why = "; ".join(sorted({row.why for row in rows})) or "fp8.convert was not called"
        raise ValueError(f"no layer of {type(model).__name__} can be stored in FP8: {why}")
    state = model.state_dict()
    tensors = _plain(model, state, factors)
    for name, layer in layers.items():
        factor = factors.get(id(layer.weight), 1.0)
        weight = state[f"{name}.weight"].float()
        tensors |= _stored(name, layer, weight, factor, ratios.get(name, 1.0))
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    _write(model, folder, tensors, _config(model, layers))
    return Report(rows)


def _factors(model: nn.Module) -> tuple[dict[int, float], dict[str, float]]:
    """What transforms have taken out of the model: id of a parameter -> the factor that it lacks;
    layer -> how many times larger than without them its input is."""
    for name, module in model.named_modules():
        if type(module).__module__.startswith("unit_scaling._modules"):
            raise ValueError(f"{name} is a module of unit_scaling: its factors are in no weight")
    names: dict[str, float] = {}
    ratios: dict[str, float] = {}
    for scope, _ in getattr(model, "_scopes", ()):
        if not hasattr(scope, "outside"):
            raise ValueError(f"{type(scope).__name__} is no part of the weights: export without it")
        weights, inputs = scope.outside(model)
        names |= weights
        ratios |= inputs
    return {id(model.get_parameter(name)): factor for name, factor in names.items()}, ratios


def _layers(model: nn.Module) -> tuple[list[Row], dict[str, Any]]:
    """The rows of the report, and the layers to be stored in FP8."""
    uses: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    rows, layers = [], {}
    for name, module in model.named_modules():
        if is_replacement(module):
            raise ValueError(f"{name} is a layer of another library: fp8.revert the model first")
        recipe = getattr(module, "fp8_recipe", None)
        if recipe is None:
            continue
        kind = type(module).__name__
        if not isinstance(module, nn.Linear):
            why = "the layout has linear layers only"
        elif not name:
            why = "the model itself: it has no name to be stored under"
        elif "weight" not in dict(module.named_parameters(recurse=False)):
            why = "its weight is computed, not a parameter"
        elif uses.get(id(module.weight), 0) != 1:
            why = "its weight is tied to another module's"
        else:
            why = _unfit(recipe)
        rows.append(Row(name, kind, LEFT_ALONE if why else "FP8", why or recipe.name))
        if not why:
            layers[name] = module
    return rows, layers


def _unfit(recipe: Recipe) -> str:
    """Why what a recipe does in the forward pass cannot be stored; "" if it can."""
    for cast, known in ((recipe.weight, _WEIGHTS), (recipe.input, _INPUTS)):
        if cast is None or cast.scaling not in known:
            return f"no layout for recipe {recipe.name!r}"
        history = cast.history or None
        usual = Cast(format="e4m3", scaling=cast.scaling, rule=cast.rule, history=history)
        if cast != usual:
            return f"no layout for recipe {recipe.name!r}: {cast}"
    return ""


def _plain(
    model: nn.Module, state: dict[str, Tensor], factors: dict[int, float]
) -> dict[str, Tensor]:
    """The state_dict without histories, factors multiplied in again, ties kept."""
    known = histories(model)
    tensors = {name: tensor for name, tensor in state.items() if name not in known}
    scaled: dict[int, Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        key = id(parameter)
        if key in factors:
            tensors[name] = scaled.setdefault(key, state[name] * factors[key])
    return tensors


def _stored(
    name: str, layer: Any, weight: Tensor, factor: float, ratio: float
) -> dict[str, Tensor]:
    """The tensors of a layer in FP8, by name. factor: that ``weight`` lacks. ratio: of its input
    to the one that it has when it is served."""
    recipe, known = layer.fp8_recipe, histories(layer)
    scale = _scale(name, weight, recipe.weight, known.get("fp8_amax_weight"))
    if recipe.weight.rule is None:
        scale = scale * 2.0 ** static_exponent(layer.weight)
    how: Any = {"rounding": "nearest", "overflow": "saturate", "random_bits": 31}
    units = quantize_operand(weight, E4M3, scale=scale, **how) / scale
    stored = {
        f"{name}.weight": units.to(E4M3.dtype).contiguous(),
        f"{name}.weight_scale": torch.atleast_1d(scale * factor),
    }
    if not _INPUTS[recipe.input.scaling][1]:
        scale = _scale(name, weight, recipe.input, known.get("fp8_amax_input"))
        stored[f"{name}.input_scale"] = torch.atleast_1d(scale / ratio)
    return stored


def _scale(name: str, x: Tensor, cast: Cast, history: Tensor | None) -> Tensor:
    """() or, for each row of ``x``, (rows, 1)."""
    if cast.rule is None:
        return x.new_ones(())
    if history is None:
        return scale_of(x, (-1,) if cast.scaling == "row" else None, E4M3, cast.rule)
    if not bool(history.any()):
        raise ValueError(f"{name} has scaling 'delayed' and no history yet: train the model first")
    return delayed_scale(x, history, E4M3, cast.rule, False)


def _config(model: nn.Module, layers: dict[str, Any]) -> dict[str, Any]:
    """The quantization_config: a group for each pair of strategies."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, layer in layers.items():
        recipe = layer.fp8_recipe
        groups.setdefault((recipe.weight.scaling, recipe.input.scaling), []).append(name)
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "ignore": [name for name in linear if name not in layers],
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


def _write(model: Any, folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(folder, state_dict=tensors)
        path = folder / "config.json"
        content = {**json.loads(path.read_text(encoding="utf-8")), "quantization_config": config}
    else:
        path = folder / "fp8.json"
        tied = _tied(tensors)
        whole = {name: t.contiguous() for name, t in tensors.items() if name not in tied}
        need("safetensors").save_file(whole, folder / "model.safetensors")
        content = {"quantization_config": config, "tied": tied}
    text = json.dumps(content, indent=2, sort_keys=True) + "\n"
    path.write_text(text, encoding="utf-8")


def _tied(tensors: dict[str, Tensor]) -> dict[str, str]:
    """The names whose tensor has another name before -> that name."""
    first: dict[Any, str] = {}
    tied = {}
    for name, tensor in tensors.items():
        known = first.setdefault((tensor.data_ptr(), tensor.shape, tensor.stride()), name)
        if known != name and tensor.numel():
            tied[name] = known
    return tied
