"""How the parts of a weight are found in a checkpoint, and read without rounding."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from ..casts.scaled_tensor import Memory
from ..formats.format import FORMATS
from ..recipes.scaling import Tile
from .layouts import FORMS, Config

NAMES: dict[str, tuple[str, ...]] = {
    **FORMS,
    "values": (*FORMS["values"], "_{}_qdata"),
    "scale": (*FORMS["scale"], "_{}_scale"),
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
    for target in (path, *patterns, *classes):
        if target in tiles:
            return tiles[target]
    return None


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
    # Blocks may be a dimension of their own.
    grouped = scale.dim() > 1 and values.shape == (*scale.shape, 16)
    if values.dtype == torch.uint8:
        # The first of two values is in the low four bits.
        codes = torch.stack([values & 15, values >> 4], -1).flatten(-2)
        magnitudes = values.new_tensor(_E2M1, dtype=torch.float32)[(codes & 7).long()]
        values = torch.where(codes > 7, -magnitudes, magnitudes).to(torch.float8_e4m3fn)
        values = values.flatten(-2) if grouped else values
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
    if "factor" in tensors:
        scale = scale * tensors["factor"].float()
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


def need_scales(
    name: str,
    tensors: Mapping[str, Tensor],
    method: str | None,
) -> None:
    """Raises ValueError for values without a scale."""
    # With a scale of 1 in its place, weights would be about 100 times too large.
    # NVFP4 has two levels: scales in e4m3, and one for the tensor.
    two = "scale" in tensors and tensors["scale"].dtype == torch.float8_e4m3fn
    needed = ("divisor", "factor") if two else ("scale",)
    if not any(part in tensors for part in needed):
        path, dot, last = name.rpartition(".")
        forms = [form for part in needed for form in NAMES[part]]
        sought = ", ".join(path + dot + form.format(last) for form in forms)
        raise ValueError(
            f"{name} is stored in {tensors['values'].dtype} without a scale: the checkpoint "
            f"(quant_method {method!r}) has none of {sought}. unscaled=True takes FP8 values as "
            "the numbers themselves"
        )
