"""Files that name the tensors of a model otherwise than its state_dict, as its library says: with a
weight for each expert in place of a stack, or under other names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..casts.scaled_tensor import Memory
from ..recipes.scaling import Tile
from .layouts import Config
from .reading import memory_of, names_in, need_scales, tile_in
from .stacks import names_in_files, rows_in


class Checkpoint(NamedTuple):
    """What a source has. config: its quantization_config. other: name -> the name that the tensor
    has there. tiles: name of values -> their tile, of tensors that know it. unscaled: as in
    `fp8.load`."""

    tensors: dict[str, Tensor]
    config: Config
    other: Mapping[str, str] = {}
    tiles: Mapping[str, Tile] = {}
    unscaled: bool = False

    def is_low(self, parts: Mapping[str, str], dtype: torch.dtype) -> bool:
        """Whether a weight is stored in low precision. parts: the names of its tensors. dtype: of
        its parameter."""
        values = self.tensors[parts["values"]]
        low = values.itemsize == 1 or not values.is_floating_point()
        return "scale" in parts or (
            low and dtype.is_floating_point and values.dtype != dtype
        )

    def memory(
        self,
        name: str,
        parts: Mapping[str, str],
        kind: type[nn.Module],
        device: torch.device,
    ) -> Memory:
        """The values and scales of a weight in low precision. kind: the class of its layer. Raises
        ValueError for values without a scale, and scales that fit no tile."""
        tensors = {part: self.tensors[key] for part, key in parts.items()}
        if self.unscaled and tensors["values"].is_floating_point():
            tensors.setdefault("scale", torch.ones(()))
        need_scales(name, tensors, self.config.get("quant_method"))
        by_config = tile_in(self.config, name.rpartition(".")[0], kind)
        tile = self.tiles.get(parts["values"], by_config)
        return memory_of(name, tensors, tile, device)


def as_state(
    model: nn.Module,
    targets: Mapping[str, Tensor],
    checkpoint: Checkpoint,
) -> Checkpoint:
    """A checkpoint, changed in place, in the names of the state_dict. targets: name -> parameter or
    buffer."""
    tensors, tiles = checkpoint.tensors, dict(checkpoint.tiles)
    other = dict(checkpoint.other)
    absent = {
        name: torch.empty(target.shape, device="meta")
        for name, target in targets.items()
        if name not in other and not names_in(tensors, name, targets)
    }
    other |= names_in_files(model, absent)
    for name, shape in absent.items():
        if name in other or shape.dim() < 2:
            continue
        target = targets[name]
        rows = rows_in(model, name, shape)
        parts = {key: names_in(tensors, key, targets) for key in rows}
        if not all(parts.values()):
            continue
        weights = []
        for key in sorted(rows, key=lambda key: rows[key].start):
            weights.append(_weight(key, parts[key], checkpoint, target))
            for part in parts[key].values():
                del tensors[part]
        if weights:
            _join(name, target.shape, weights, tensors, tiles)
    return checkpoint._replace(other=other, tiles=tiles)


def _weight(
    name: str,
    parts: Mapping[str, str],
    checkpoint: Checkpoint,
    target: Tensor,
) -> Memory | Tensor:
    """A weight that a stack consists of. target: the stack."""
    values = checkpoint.tensors[parts["values"]]
    if not checkpoint.is_low(parts, target.dtype):
        return values
    return checkpoint.memory(name, parts, nn.Linear, values.device)


def _join(
    name: str,
    shape: Sequence[int],
    weights: Sequence[Memory | Tensor],
    tensors: dict[str, Tensor],
    tiles: dict[str, Tile],
) -> None:
    """Adds a stack to ``tensors``. weights: of which it consists, one after the other."""
    low = [weight for weight in weights if isinstance(weight, Memory)]
    # One scale of a weight is that of a tile.
    sizes = [weight.tile or weight.values.shape for weight in low]
    columns = {size[1] for size in sizes}
    formats = {weight.format for weight in low}
    if len(low) < len(weights) or len(columns) > 1 or len(formats) > 1:
        plain = [w.numbers() if isinstance(w, Memory) else w for w in weights]
        tensors[name] = torch.cat(plain).view(*shape)
        return
    heights = [weight.values.shape[0] for weight in low]
    tiles_high = [size[0] for size in sizes]
    # Rows that share a scale in all weights, whose last tile may be smaller.
    rows = math.gcd(*heights, *tiles_high)
    scales = []
    for weight, height, tile_high in zip(low, heights, tiles_high, strict=True):
        assert weight.scale is not None
        scale = torch.atleast_2d(weight.scale)
        scale = scale.repeat_interleave(tile_high // rows, 0)
        scales.append(scale[: height // rows])
    values = [weight.values.view(torch.uint8) for weight in low]
    joined = torch.cat(values).view(*shape)
    tensors[name] = joined.view(low[0].values.dtype)
    grid = (*shape[:-2], shape[-2] // rows, -1)
    tensors[f"{name}_scale"] = torch.cat(scales).view(grid)
    tiles[name] = (rows, columns.pop())
