"""How checkpoints store the weights and casts of a recipe: `LAYOUTS`, `INPUTS`, `NAMES`.

The names, dtypes and shapes are those that compressed-tensors 0.20 (``compressors``,
``quantization.quant_args``), Transformers 5 (``quantizers``), vLLM and SGLang (both
``layers.quantization``) read. In all of them the scales multiply the stored values.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..casts.scaled_tensor import Memory
from ..formats.format import FORMATS
from ..formats.quantize import quantize_operand
from ..recipes.cast import Cast
from ..recipes.recipe import Recipe
from ..recipes.rules import RULES
from ..recipes.scaling import SCALINGS, Tile, grid_of, scale_of, scaled_tiles, widened

__all__ = ["INPUTS", "LAYOUTS", "NAMES", "Entry", "Layout"]


# What JSON holds.
Config = dict[str, Any]


class Entry(NamedTuple):
    """A tensor of a checkpoint, before it is computed."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Layout(NamedTuple):
    """A row of `LAYOUTS`."""

    method: str
    """The ``quant_method`` of the quantization_config."""
    format: str
    """The ``format`` of compressed-tensors; "" for other methods."""
    tile: tuple[int, int]
    """The values that share a stored scale, (outputs, inputs); 0: all."""
    scale: str
    """The name of the scales."""
    dtype: torch.dtype
    """The dtype of the scales: uint8 holds the bytes of E8M0."""
    arguments: Config
    """The arguments of the weights in a group of compressed-tensors' configuration."""

    def entries(self, shape: torch.Size) -> dict[str, Entry]:
        """The tensors of a weight (outputs, inputs), by the last part of their names."""
        grid: tuple[int, ...] = (1,)
        if self.tile[0]:
            grid = tuple(grid_of(shape, self.tile))
        return {
            "weight": Entry(tuple(shape), torch.float8_e4m3fn),
            self.scale: Entry(grid, self.dtype),
        }


_TENSOR = Layout(
    method="compressed-tensors",
    format="float-quantized",
    tile=(0, 0),
    scale="weight_scale",
    dtype=torch.float32,
    arguments={"num_bits": 8, "strategy": "tensor"},
)

LAYOUTS: dict[str, Layout] = {
    **dict.fromkeys(("unit", "tensor", "delayed", "static"), _TENSOR),
    "row": _TENSOR._replace(
        tile=(1, 0), arguments={"num_bits": 8, "strategy": "channel"}
    ),
    # DeepSeek-V3's own files; Transformers' FineGrainedFP8Config.
    "block": Layout(
        method="fp8",
        format="",
        tile=(128, 128),
        scale="weight_scale_inv",  # which multiplies, as all scales here
        dtype=torch.float32,
        arguments={},
    ),
    # compressed-tensors' preset MXFP8. vLLM's method "mxfp8" reads no FP8 files.
    "mx": Layout(
        method="compressed-tensors",
        format="mxfp8-quantized",
        tile=(1, 32),
        scale="weight_scale",
        dtype=torch.uint8,
        arguments={
            "num_bits": 8,
            "strategy": "group",
            "group_size": 32,
            "scale_dtype": "torch.uint8",
        },
    ),
}
"""Scaling of a weight -> its layout."""

_STATIC = {"num_bits": 8, "strategy": "tensor", "dynamic": False}

INPUTS: dict[str, Config] = {
    **dict.fromkeys(("unit", "delayed", "static"), _STATIC),
    "tensor": _STATIC | {"dynamic": True},
    "row": {"num_bits": 8, "strategy": "token", "dynamic": True},
    "block": {},
    "mx": LAYOUTS["mx"].arguments | {"dynamic": True},
}
"""Scaling of an input -> the arguments of the inputs in a group of compressed-tensors'
configuration. "dynamic": the scale is computed at serving time."""


def unfit(recipe: Recipe) -> str:
    """Why the forward pass of a recipe has no layout; "" if it has one."""
    weight, input = recipe.weight, recipe.input
    none = f"no layout for recipe {recipe.name!r}"
    then = "convert the model to 'tensor', 'row', 'block' or 'mxfp8' first"
    if weight is None or input is None:
        return f"{none}: {then}"
    scalings = {weight.scaling, input.scaling}
    # Engines read one method for a layer, which says how both operands are scaled.
    mixed = len(scalings) > 1 and scalings & {"block", "mx"}
    if mixed or not scalings <= LAYOUTS.keys():
        return f"{none}: {then}"
    for cast, tile in (
        (weight, LAYOUTS[weight.scaling].tile),
        (input, input.tile),
    ):
        usual = Cast(
            format="e4m3",
            scaling=cast.scaling,
            rule=cast.rule,
            history=cast.history or None,
        )
        if cast is weight and SCALINGS[cast.scaling].free:
            usual = replace(usual, tile=cast.tile)
        # Readers compute the scales of inputs from largest magnitudes.
        unread = cast.rule is not None and RULES[cast.rule].is_simulated
        parts = zip(cast.tile, tile, strict=True)
        if cast != usual or unread or any(by and n % by for n, by in parts):
            return f"{none}: {cast}; {then}"
    return ""


def misfit(layout: Layout, shape: torch.Size) -> str:
    """Why a weight of a shape does not fit its layout; "" if it does."""
    # Readers infer the tiles of method "fp8" from the number of scales: a weight consists of full
    # ones, or is a part of one.
    partial = layout.method == "fp8"
    pairs = zip(shape, layout.tile, strict=True)
    if all(not by or n % by == 0 or (partial and n <= by) for n, by in pairs):
        return ""
    size = "x".join(map(str, layout.tile))
    return f"its shape {tuple(shape)} is not made of whole {size} blocks: take recipe 'row'"


def stored(
    layout: Layout,
    weight: Tensor,
    cast: Cast,
    scale: Tensor | None,
) -> dict[str, Tensor]:
    """The tensors of a float32 weight, rounded as its cast does, by the last part of their names.
    scale: of a cast that does not compute it."""
    format, (down, along) = cast.number_format, cast.tile
    if scale is None:
        rule = cast.stored_rule
        assert rule is not None
        tiles, dims = scaled_tiles(weight, (down, along), -1)
        scale = scale_of(tiles, dims, format, rule)
    shape = layout.entries(weight.shape)[layout.scale].shape
    if scale.dim():
        scale = scale.reshape(grid_of(weight.shape, (down, along)))
    wide = widened(scale, weight.shape, (down, along))
    values = quantize_operand(weight, format, scale=wide) / wide
    if scale.dim():
        # A tile of the cast may consist of several of the layout, each with its scale.
        pairs = zip((down, along), layout.tile, strict=True)
        rows, columns = (n // by if by else 1 for n, by in pairs)
        scale = widened(scale, shape, (rows, columns))
    if layout.dtype == torch.uint8:
        scale = scale.to(torch.float8_e8m0fnu).view(torch.uint8)
    return {
        "weight": values.to(torch.float8_e4m3fn).contiguous(),
        layout.scale: scale.to(layout.dtype).reshape(shape),
    }


NAMES: dict[str, tuple[str, ...]] = {
    "values": ("{}", "{}_packed", "_{}_qdata"),
    "scale": ("{}_scale", "{}_scale_inv", "_{}_scale"),
    "divisor": ("{}_global_scale",),
}
"""Part of a weight -> the last part of its name in a file, for a weight whose own is in the braces:
those of `LAYOUTS`, and those that torchao's ``flatten_tensor_state_dict`` writes."""

# The magnitudes of e2m1, by the code without its sign.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

# The dtype of scales -> the values of a row that share one, where no configuration says it: by the
# definitions of MX (OCP Microscaling Formats 1.0, section 5.3) and of NVFP4.
_GROUPS = {torch.float8_e8m0fnu: 32, torch.float8_e4m3fn: 16}


def names_in(
    state: Mapping[str, Tensor],
    weight: str,
    targets: Collection[str],
) -> dict[str, str]:
    """The names in a checkpoint of the parts of a weight, by the keys of `NAMES`; {} without
    values. targets: the names of all weights, which are no part of another one."""
    path, dot, last = weight.rpartition(".")
    names = {}
    for part, forms in NAMES.items():
        for form in reversed(forms):
            name = path + dot + form.format(last)
            if name in state and (name == weight or name not in targets):
                names[part] = name
    if "values" in names:
        return names
    return {}


def tile_in(
    config: Config,
    path: str,
    kind: type[nn.Module],
) -> Tile | None:
    """The values of the weight of a layer that share a scale, by a quantization_config; None if it
    does not say so. path, kind: the name and the class of the layer."""
    tiles: dict[str, Tile | None] = {}
    for group in (config.get("config_groups") or {}).values():
        if group.get("weights"):
            tiles |= dict.fromkeys(group["targets"], _tile_by(group["weights"]))
    if not tiles:
        return _tile_by(config)
    # In the order of compressed-tensors: names, patterns ("re:"), classes.
    patterns = [t for t in tiles if t.startswith("re:") and re.match(t[3:], path)]
    classes = [base.__name__ for base in kind.__mro__]
    found = (tiles[t] for t in (path, *patterns, *classes) if t in tiles)
    return next(found, None)


def _tile_by(settings: Config) -> Tile | None:
    """Returns the tile that a quantization_config states, or the weight arguments of one of its
    groups; None if it states none."""
    block = settings.get("weight_block_size") or settings.get("block_structure")
    if block:
        return int(block[0]), int(block[1])
    if settings.get("group_size"):
        return 1, max(settings["group_size"], 0)  # -1: all of a row
    return {"channel": (1, 0), "tensor": (0, 0)}.get(settings.get("strategy", ""))


def memory_of(
    weight: str,
    tensors: Mapping[str, Tensor],
    tile: Tile | None,
    device: torch.device,
) -> Memory:
    """A weight as FP8 values and float32 scales, without rounding. e2m1 values become e4m3.

    weight: its name, for errors. tensors: by the keys of `NAMES`; values in e4m3, e5m2, or packed
    e2m1 in uint8; scales of the tensor, of each row or of each block; bytes are biased exponents.
    tile: the values that share a scale; None: as the shapes say. Raises ValueError for another
    dtype, and for scales that do not have the tile or, without one, admit several.
    """
    values, scale = tensors["values"], tensors["scale"]
    if values.dtype == torch.uint8:
        # The first of two values is in the low four bits.
        codes = torch.stack([values & 15, values >> 4], -1).flatten(-2)
        magnitudes = values.new_tensor(_E2M1, dtype=torch.float32)[(codes & 7).long()]
        values = torch.where(codes > 7, -magnitudes, magnitudes).to(torch.float8_e4m3fn)
    formats = {FORMATS[name].dtype: name for name in ("e4m3", "e5m2")}
    if values.dtype not in formats:
        raise ValueError(
            f"{weight} is stored in {values.dtype}; load reads e4m3, e5m2 and e2m1"
        )
    if scale.dtype == torch.uint8:
        scale = scale.view(torch.float8_e8m0fnu)
    group, scale = _GROUPS.get(scale.dtype), scale.float()
    if "divisor" in tensors:  # what the writer has multiplied the scales by
        scale = scale / tensors["divisor"].float()
    if scale.numel() == 1:
        scale = scale.reshape([1] * values.dim())
    elif scale.shape == values.shape[:1]:  # of each row, without further dimensions
        scale = scale.reshape(-1, *[1] * (values.dim() - 1))
    if scale.numel() > 1 or (values.dim() > 1 and any(tile or ())):
        tile = _tile_of(weight, values.shape, scale.shape, tile, group)
    if scale.numel() == 1:
        scale, tile = scale.reshape(()), None
    return Memory(values.to(device), scale.to(device), formats[values.dtype], tile)


def _tile_of(
    weight: str,
    shape: torch.Size,
    grid: torch.Size,
    tile: Tile | None,
    group: int | None,
) -> Tile:
    """The tile of a grid of scales. group: the values of a row that share a scale of this dtype."""
    rows, columns = tile or (None, None)
    if len(grid) == len(shape) > 1 and grid[:-2] == shape[:-2]:
        if tile is None and group and (grid[-2], grid[-1] * group) == shape[-2:]:
            rows, columns = 1, group
        down = _size(shape[-2], grid[-2], rows)
        along = _size(shape[-1], grid[-1], columns)
        if down and along:
            return down, along
    why = "which fit no block size, or several"
    if tile is not None:
        why = f"not one for each block of {tile[0] or 'all'} x {tile[1] or 'all'}"
    raise ValueError(
        f"{weight} of shape {tuple(shape)} has scales of shape {tuple(grid)}, {why}: pass config=, "
        'the quantization_config of the file, such as {"weight_block_size": [128, 128]}'
    )


def _size(
    n: int,
    count: int,
    by: int | None,
) -> int | None:
    """The size of blocks, the last one full or not, of which ``count`` are ``n`` values: ``by`` (0:
    all), or without it the only one; None if there is none."""
    if by is not None:
        size = min(by or n, n)
        if n and -(-n // size) == count:
            return size
        return None
    if count == 1:
        return n
    # From n / count, rounded up, to less than n / (count - 1): the scales of one size alone.
    least = -(-n // max(count, 1))
    if least == -(-n // (count - 1)) - 1:
        return least
    return None


def configuration(layers: dict[str, Any], ignore: list[str]) -> Config:
    """The quantization_config. layers: of one layout. ignore: other linear layers."""
    first = next(iter(layers.values()))
    layout = LAYOUTS[first.fp8_recipe.weight.scaling]
    if layout.method == "fp8":
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(layout.tile),
            "modules_to_not_convert": ignore,
        }
    groups: dict[str, list[str]] = {}
    for name, layer in layers.items():
        groups.setdefault(json.dumps(_arguments(name, layer)), []).append(name)
    if len(groups) == 1:
        groups = {arguments: ["Linear"] for arguments in groups}
    config_groups = {}
    for i, (arguments, targets) in enumerate(groups.items()):
        others = {"targets": targets, "output_activations": None}
        config_groups[f"group_{i}"] = json.loads(arguments) | others
    return {
        "quant_method": layout.method,
        "format": layout.format,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "ignore": ignore,
        "config_groups": config_groups,
    }


def _arguments(name: str, layer: Any) -> Config:
    recipe = layer.fp8_recipe
    always: Config = {"type": "float", "symmetric": True}
    weights = always | {"dynamic": False} | LAYOUTS[recipe.weight.scaling].arguments
    inputs = INPUTS[recipe.input.scaling]
    in_list = sum(part.isdigit() for part in name.split(".")) >= 2
    if inputs.get("strategy") == "token" and not in_list:
        # compressed-tensors takes the first two dimensions for tokens, so that an input (tokens,
        # features) would have a single scale. A group of all features is a scale for each token in
        # every library. Engines that fuse a list of experts insist on "token" for these.
        inputs = inputs | {"strategy": "group", "group_size": layer.in_features}
    return {"weights": weights, "input_activations": always | inputs}
