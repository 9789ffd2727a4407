"""What is stored of a weight in a layout: whether a recipe has it, its tensors, and the
quantization_config."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..formats.quantize import quantize_operand
from ..kernels.nv import in_pairs
from ..recipes.cast import Cast
from ..recipes.recipe import RECIPES, Recipe
from ..recipes.rules import LOWERED, RULES
from ..recipes.scaling import (
    SCALINGS,
    grid_of,
    scaled_tiles,
    scales_and_unit,
    widened,
)
from .layouts import LAYOUTS, ORDERS, Config, Layout


def unfit(recipe: Recipe, layout: Layout) -> str:
    """The cast of the forward pass of a recipe that a layout does not have, or another reason;
    "" if it has both."""
    weight, input = recipe.weight, recipe.input
    if weight is None:
        return "a weight without a cast"
    if weight.scaling not in layout.scalings:
        return str(weight)
    if _input_of(recipe) not in layout.inputs:
        return str(input or "an input without a cast")
    casts = [(weight, layout.tile)]
    if input is not None:
        casts.append((input, input.tile))
    for cast, tile in casts:
        usual = Cast(
            format=layout.format,
            scaling=cast.scaling,
            rule=cast.rule,
            history=cast.history or None,
        )
        if cast is weight and SCALINGS[cast.scaling].free:
            usual = replace(usual, tile=cast.tile)
        # Readers compute the scales of inputs from largest magnitudes.
        read = cast is weight or layout.inputs[cast.scaling] is not None
        unread = read and cast.rule is not None and RULES[cast.rule].is_simulated
        parts = zip(cast.tile, tile, strict=True)
        if cast != usual or unread or any(by and n % by for n, by in parts):
            return str(cast)
    rule = weight.stored_rule
    if layout.in_powers and rule is not None and not LOWERED[rule].form.is_power:
        return f"{weight}, whose scales are no powers of two"
    return ""


def _input_of(recipe: Recipe) -> str:
    """The key of a recipe in `Layout.inputs`."""
    return recipe.input.scaling if recipe.input is not None else ""


def layout_of(recipe: Recipe, name: str | None) -> Layout | str:
    """The layout of this name, or the first one for files, if it has the recipe; else why not."""
    rows = [row for row in LAYOUTS.values() if row.place == "file"]
    if name is not None:
        rows = [LAYOUTS[name]]
    whys = [unfit(recipe, row) for row in rows]
    for row, why in zip(rows, whys, strict=True):
        if not why:
            return row
    if name is None:
        then = "convert the model to 'tensor', 'row', 'block' or 'mxfp8' first"
        # Of the layout that has the weight, if there is one.
        of_input = [why for why in whys if why != str(recipe.weight)]
        return f"no layout for recipe {recipe.name!r}: {(of_input or whys)[0]}; {then}"
    fit = [repr(each.name) for each in RECIPES.values() if not unfit(each, rows[0])]
    return (
        f"layout {name!r} has no recipe {recipe.name!r}: {whys[0]}; convert the model to "
        f"{', '.join(fit)} first"
    )


def misfit(layout: Layout, shape: Sequence[int], is_whole: bool = True) -> str:
    """Why a weight of a shape does not fit its layout; "" if it does. is_whole: whether its recipe
    casts it alone."""
    # Readers infer the tiles of method "fp8" from the number of scales: a weight consists of full
    # ones, or is a part of one.
    partial = is_whole and layout.method == "fp8" and not layout.fused
    pairs = zip(shape, layout.tile, strict=True)
    if all(not by or n % by == 0 or (partial and n <= by) for n, by in pairs):
        return ""
    size = "x".join(map(str, layout.tile))
    return f"its shape {tuple(shape)} is not made of whole {size} blocks: take recipe 'row'"


class Encoded(NamedTuple):
    """A weight (outputs, inputs) in units of its scales, both in float32, one scale for each tile
    of a layout. unit: what the scales are multiples of, 0-dim; None: of nothing."""

    values: Tensor
    scale: Tensor
    unit: Tensor | None

    def numbers(self, layout: Layout) -> Tensor:
        """The weight in float32."""
        return self.values * widened(self.scale, self.values.shape, layout.tile)


def encoded(
    layout: Layout,
    weight: Tensor,
    cast: Cast,
    scale: Tensor | None,
    amax: Tensor | None = None,
) -> Encoded:
    """A float32 weight, rounded as its cast does. scale: of a cast that does not compute it. amax:
    the largest magnitude of what shares its unit or its only scale; None: of the weight."""
    format, unit = cast.number_format, None
    if scale is None:
        name = cast.stored_rule
        assert name is not None
        rule = LOWERED[name]
        if amax is not None:
            unit = rule.unit_of(amax, format)
        tiles, dims = scaled_tiles(weight, cast.tile, -1)
        if amax is not None and dims is None:
            scale = rule.scale_of(amax, format, unit)
        else:
            scale, unit = scales_and_unit(tiles, dims, format, rule, unit)
    if scale.dim():
        scale = scale.reshape(grid_of(weight.shape, cast.tile))
    wide = widened(scale, weight.shape, cast.tile)
    values = quantize_operand(weight, format, scale=wide) / wide
    if scale.dim():
        # A tile of the cast may consist of several of the layout, each with its scale.
        pairs = zip(cast.tile, layout.tile, strict=True)
        rows, columns = (n // by if by else 1 for n, by in pairs)
        scale = widened(scale, grid_of(weight.shape, layout.tile), (rows, columns))
    return Encoded(values, scale, unit)


def stored(
    layout: Layout,
    experts: Sequence[Encoded],
    stem: str,
    of_experts: bool = False,
) -> dict[str, Tensor]:
    """The tensors of a weight, by the last part of their names. stem: its name. of_experts: whether
    the experts are the first dimension; else there is one."""
    values = torch.stack([one.values for one in experts])
    scale = torch.stack([one.scale for one in experts])
    if not of_experts:
        values, scale = values[0], scale[0]
    outputs = values.shape[-2]
    if layout.format == "e2m1":
        # Dividing by a scale that is no power of two leaves errors of float32.
        packed = in_pairs(values.flatten(0, -2))
        shape = layout.entries(values.shape)["values"].shape
        found = {"values": packed.view(shape)}
    else:
        found = {"values": values.to(torch.float8_e4m3fn)}
    unit = experts[0].unit
    if unit is not None:
        # A value above the range occurs only for tiles that are all zeros.
        scale = (scale / unit).clamp(max=448.0)
        found["divisor"] = torch.atleast_1d(unit.reciprocal())
        found["factor"] = torch.atleast_1d(unit)
    if layout.order != "packed":
        scale = _in_dtype(scale, layout.dtype)
    found["scale"] = ORDERS[layout.order].write(torch.atleast_1d(scale), outputs)
    return {form.format(stem): found[part] for part, form in layout.forms.items()}


def _in_dtype(scale: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == torch.uint8:
        return scale.to(torch.float8_e8m0fnu).view(torch.uint8)
    return scale.to(dtype)


def configuration(
    layers: dict[str, Any],
    layouts: dict[str, Layout],
    ignore: list[str],
) -> Config:
    """The quantization_config. layers, layouts: by name; of one method. ignore: other linear
    layers."""
    first = next(iter(layouts.values()))
    config: Config = {"quant_method": first.method}
    match first.method:
        case "compressed-tensors":
            groups = _groups(layers, layouts)
            return config | {
                "format": first.style,
                "quantization_status": "compressed",
                "global_compression_ratio": None,
                "kv_cache_scheme": None,
                "ignore": ignore,
                "config_groups": groups,
            }
        case "mxfp4":
            return config | {"modules_to_not_convert": ignore}
        case "modelopt":
            group = {"weights": {"dynamic": False, **first.arguments}}
            return config | {
                "quant_algo": first.style,
                "ignore": ignore,
                "config_groups": {"group_0": group | {"targets": ["Linear"]}},
            }
    config |= {
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(first.tile),
        "modules_to_not_convert": ignore,
    }
    if first.in_powers:
        config["scale_fmt"] = "ue8m0"
    return config


def _groups(layers: dict[str, Any], layouts: dict[str, Layout]) -> Config:
    """The ``config_groups`` of compressed-tensors."""
    by_arguments: dict[str, list[str]] = {}
    for name, layer in layers.items():
        text = json.dumps(_arguments(name, layer, layouts[name]))
        by_arguments.setdefault(text, []).append(name)
    if len(by_arguments) == 1:
        by_arguments = {arguments: ["Linear"] for arguments in by_arguments}
    groups = {}
    for i, (arguments, targets) in enumerate(by_arguments.items()):
        others = {"targets": targets, "output_activations": None}
        groups[f"group_{i}"] = json.loads(arguments) | others
    return groups


def _arguments(name: str, layer: Any, layout: Layout) -> Config:
    always: Config = {"type": "float", "symmetric": True}
    weights = always | {"dynamic": False} | dict(layout.arguments)
    inputs = layout.inputs[_input_of(layer.fp8_recipe)]
    if inputs is None:
        return {"weights": weights}
    in_list = sum(part.isdigit() for part in name.split(".")) >= 2
    if inputs.get("strategy") == "token" and not in_list:
        # compressed-tensors takes the first two dimensions for tokens, so that an input (tokens,
        # features) would have a single scale. A group of all features is a scale for each token in
        # every library. Engines that fuse a list of experts insist on "token" for these.
        inputs = inputs | {"strategy": "group", "group_size": layer.in_features}
    return {"weights": weights, "input_activations": always | inputs}


def needs_input_scale(recipe: Recipe, layout: Layout) -> bool:
    """Whether the scale of the input of a layer is stored."""
    arguments = layout.inputs[_input_of(recipe)]
    return arguments is not None and arguments.get("dynamic") is False
