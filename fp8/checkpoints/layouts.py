"""`LAYOUTS`: how inference engines have weights in low precision, in files and in memory.

In all rows values times scales are the weight, whatever the scales are called. A scale of E8M0 is
the byte of a biased exponent: 2**(byte - 127).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..kernels.blackwell import swizzled
from ..recipes.scaling import Tile, grid_of

__all__ = ["LAYOUTS", "ORDERS", "Entry", "Fused", "Layout", "Order", "Source"]

# What JSON holds.
Config = dict[str, Any]

E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu


class Entry(NamedTuple):
    """A tensor of a checkpoint, before it is computed."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


# Orders of scales


@dataclass(frozen=True, kw_only=True)
class Order:
    """How the scales of a weight lie in memory: a row of `ORDERS`.

    Attributes:
        about: what it is.
        shape: a function (grid, outputs) -> the shape of the tensor. grid: the shape of the scales,
            (..., rows, columns), one for each tile. outputs: of the weight.
        write: a function (scales, outputs) -> that tensor, of scales in the dtype of the layout
            (float32 powers of two for int32).
        stride: a function of the shape -> the strides of the last two dimensions; None: contiguous.
    """

    about: str
    shape: Callable[[Sequence[int], int], tuple[int, ...]]
    write: Callable[[Tensor, int], Tensor]
    stride: Callable[[Sequence[int]], tuple[int, int]] | None = None


def _round_up(n: int, by: int) -> int:
    return -(-n // by) * by


def _packed_shape(grid: Sequence[int], outputs: int) -> tuple[int, ...]:
    return *grid[:-2], outputs, -(-grid[-1] // 4)


def _packed(scale: Tensor, outputs: int) -> Tensor:
    rows = torch.arange(outputs, device=scale.device) // 128
    bytes = scale.to(E8M0).view(torch.uint8)[..., rows, :]
    padding = (0, -bytes.shape[-1] % 4, 0, -outputs % 4)
    words = F.pad(bytes, padding).contiguous().view(torch.int32)
    # Not words.mT.contiguous(), whose strides mean nothing for a single column.
    columns = torch.empty_like(words.mT, memory_format=torch.contiguous_format)
    return columns.copy_(words.mT).mT[..., :outputs, :]


def _packed_stride(shape: Sequence[int]) -> tuple[int, int]:
    return 1, _round_up(shape[-2], 4)  # 16 bytes, the alignment of TMA


def _swizzled_shape(grid: Sequence[int], outputs: int) -> tuple[int, ...]:
    return *grid[:-2], _round_up(grid[-2], 128), _round_up(grid[-1], 4)


def _swizzled(scale: Tensor, outputs: int) -> Tensor:
    shape = _swizzled_shape(scale.shape, outputs)
    each = [swizzled(one) for one in scale.reshape(-1, *scale.shape[-2:])]
    return torch.stack(each).view(shape)


ORDERS: dict[str, Order] = {
    "rows": Order(
        about="row by row",
        shape=lambda grid, outputs: tuple(grid),
        write=lambda scale, outputs: scale,
    ),
    # DeepGEMM, get_mn_major_tma_aligned_packed_ue8m0_tensor.
    "packed": Order(
        about="a row for each output, 4 bytes of E8M0 along it in an int32, the first one lowest; "
        "column by column, each padded to 16 bytes",
        shape=_packed_shape,
        write=_packed,
        stride=_packed_stride,
    ),
    # cuBLAS, "1D Block Scaling Factors Layout".
    "swizzled": Order(
        about="tiles of 128 x 4, padded with zeros; row i, column j of one at "
        "16 (i mod 32) + 4 (i div 32) + j",
        shape=_swizzled_shape,
        write=_swizzled,
    ),
}
"""Name -> order of scales."""


# Layouts


class Fused(NamedTuple):
    """Layers of a model that an engine has as one: their outputs one after the other."""

    name: str
    parts: tuple[str, ...]


class Source(NamedTuple):
    """Where an engine defines a layout."""

    engine: str
    repository: str
    path: str
    version: str
    """The commit that was read, or the release."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A row of `LAYOUTS`. ``{}`` in the name of a part is that of the weight.

    Attributes:
        name: the key.
        place: "file", or "memory": the parameters of an engine after it has loaded them.
        sources: the engines that have it, and where they define it.
        scalings: those of `fp8.recipes.scaling.SCALINGS` of the weights that are written in it.
        format: of the values: "e4m3", or "e2m1", two in a byte, the first in the low four bits.
        values: the name of the values.
        grouped: whether the values of a scale are a dimension of their own.
        tile: the values that share a stored scale, (outputs, inputs); 0: all.
        scale: the name of the scales.
        dtype: the dtype of the scales. uint8 and int32 hold bytes of E8M0.
        order: the key of `ORDERS`.
        divisor: the name of a float32 that the scales have been multiplied by; "": none.
        factor: the name of a float32 that they are to be multiplied by; "": none.
        fused: layers that are one. experts: layers of each expert, which are one parameter of all:
            (experts, outputs, inputs).
        shared: layers that the engine fuses when it loads them, under the largest `divisor`, so
            that all need the same.
        method: the ``quant_method`` of the quantization_config. style: the ``format`` of
            compressed-tensors, or the ``quant_algo`` of Model-Optimizer; "" for other methods.
        arguments: of the weights, in a group of the configuration.
        inputs: scaling of an input, "" without a cast -> its arguments there. None: it is served
            without a cast. "dynamic": the scale is computed at serving time.
    """

    name: str
    place: str = "file"
    sources: tuple[Source, ...]
    scalings: tuple[str, ...]
    format: str = "e4m3"
    values: str = "{}"
    grouped: bool = False
    tile: Tile
    scale: str = "{}_scale"
    dtype: torch.dtype = torch.float32
    order: str = "rows"
    divisor: str = ""
    factor: str = ""
    fused: tuple[Fused, ...] = ()
    experts: tuple[Fused, ...] = ()
    stacked: bool = False
    shared: tuple[Fused, ...] = ()
    method: str = "compressed-tensors"
    style: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, Any]

    @property
    def in_powers(self) -> bool:
        """Whether the scales are powers of two."""
        return self.dtype in (torch.uint8, torch.int32, E8M0)

    @property
    def forms(self) -> dict[str, str]:
        """Part of a weight -> its name, of those that the layout has."""
        names = {
            "values": self.values,
            "scale": self.scale,
            "divisor": self.divisor,
            "factor": self.factor,
        }
        return {part: form for part, form in names.items() if form}

    def entries(self, shape: Sequence[int]) -> dict[str, Entry]:
        """The tensors of a weight (..., outputs, inputs), by the keys of `forms`."""
        *lead, outputs, inputs = shape
        values = Entry(tuple(shape), E4M3)
        if self.format == "e2m1":
            values = Entry((*lead, outputs, inputs // 2), torch.uint8)
        if self.grouped:
            by = self.tile[1]
            values = Entry((*lead, outputs, inputs // by, by // 2), torch.uint8)
        grid: tuple[int, ...] = (1,)
        if self.tile[0]:
            order = ORDERS[self.order]
            grid = order.shape(grid_of(shape, self.tile), outputs)
        one = Entry((1,), torch.float32)
        found = {"values": values, "scale": Entry(grid, self.dtype)}
        return found | {part: one for part in self.forms if part not in found}

    def shape_of(self, values: Sequence[int]) -> tuple[int, ...]:
        """The shape (..., outputs, inputs) of a weight, by the shape of its values."""
        if self.grouped:
            return *values[:-2], values[-2] * values[-1] * 2
        if self.format == "e2m1":
            return *values[:-1], values[-1] * 2
        return tuple(values)


def _compressed(path: str) -> Source:
    path = f"src/compressed_tensors/compressors/{path}/base.py"
    return Source(
        "compressed-tensors", "vllm-project/compressed-tensors", path, "0.20.1"
    )


def _transformers(path: str) -> Source:
    path = f"src/transformers/{path}.py"
    return Source("transformers", "huggingface/transformers", path, "5.24.0")


def _vllm(path: str, commit: str) -> Source:
    path = f"vllm/model_executor/layers/quantization/{path}.py"
    return Source("vllm", "vllm-project/vllm", path, commit)


def _sglang(path: str, commit: str) -> Source:
    path = f"python/sglang/srt/layers/quantization/{path}.py"
    return Source("sglang", "sgl-project/sglang", path, commit)


_SCHEME = "compressed_tensors/schemes/compressed_tensors_"
_MOE = "compressed_tensors/compressed_tensors_moe/compressed_tensors_moe_"
_BY_TRANSFORMERS = _transformers("quantizers/quantizer_compressed_tensors")
_DEEPGEMM = Source(
    "deepgemm", "deepseek-ai/DeepGEMM", "csrc/apis/layout.hpp", "54e226124093"
)
_SGLANG_FP8 = _sglang("fp8", "d94a1535900d")
_VLLM_FP8_UTILS = _vllm("utils/fp8_utils", "007d50058a06")
_SGLANG_NVFP4 = _sglang(f"{_SCHEME}w4a4_nvfp4", "0541d3be453b")

_FLOAT = (
    _compressed("naive_quantized"),
    _vllm(f"{_SCHEME}w8a8_fp8", "de4766a1b8c5"),
    _sglang(f"{_SCHEME}w8a8_fp8", "01d2a3d0d57b"),
    _BY_TRANSFORMERS,
)

_STATIC = {"num_bits": 8, "strategy": "tensor", "dynamic": False}

_FLOAT_INPUTS = {
    **dict.fromkeys(("unit", "delayed", "static"), _STATIC),
    "tensor": _STATIC | {"dynamic": True},
    "row": {"num_bits": 8, "strategy": "token", "dynamic": True},
}

_MX = {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}

_FUSED = (
    Fused("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    Fused("gate_up_proj", ("gate_proj", "up_proj")),
)

_EXPERTS = (
    Fused("w13", ("gate_proj", "up_proj")),
    Fused("w13", ("w1", "w3")),
    Fused("w2", ("down_proj",)),
    Fused("w2", ("w2",)),
)

_TENSOR = Layout(
    name="tensor",
    sources=_FLOAT,
    scalings=("unit", "tensor", "delayed", "static"),
    tile=(0, 0),
    style="float-quantized",
    arguments={"num_bits": 8, "strategy": "tensor"},
    inputs=_FLOAT_INPUTS,
)

# DeepSeek-V3's own files.
_BLOCK = Layout(
    name="block",
    sources=(
        _vllm("fp8", "1436674bcb3f"),
        _SGLANG_FP8,
        _transformers("integrations/finegrained_fp8"),
    ),
    scalings=("block",),
    tile=(128, 128),
    scale="{}_scale_inv",  # which multiplies, as all scales here
    method="fp8",
    inputs={"block": {}},
)

# compressed-tensors' preset MXFP8. vLLM's method "mxfp8" reads no FP8 files.
_MXFP8 = Layout(
    name="mxfp8",
    sources=(
        _compressed("mxfp8"),
        _vllm(f"{_MOE}w8a8_mxfp8", "2acef054699d"),
        _sglang(f"{_SCHEME}w8a8_mxfp8", "719a836971b0"),
        _BY_TRANSFORMERS,
    ),
    scalings=("mx",),
    tile=(1, 32),
    dtype=torch.uint8,
    style="mxfp8-quantized",
    arguments=_MX | {"num_bits": 8},
    inputs={"mx": _MX | {"num_bits": 8, "dynamic": True}},
)

# The preset NVFP4A16: engines that cast inputs want their largest magnitude, which no cast keeps.
_NVFP4 = Layout(
    name="nvfp4",
    sources=(
        _compressed("nvfp4"),
        _vllm(f"{_SCHEME}w4a16_nvfp4", "17b6501a6ce9"),
        _BY_TRANSFORMERS,
    ),
    scalings=("nv",),
    format="e2m1",
    values="{}_packed",
    tile=(1, 16),
    dtype=E4M3,
    divisor="{}_global_scale",
    shared=(*_FUSED, Fused("w13", ("w1", "w3"))),
    style="nvfp4-pack-quantized",
    arguments={
        "num_bits": 4,
        "strategy": "tensor_group",
        "group_size": 16,
        "scale_dtype": "torch.float8_e4m3fn",
    },
    inputs={"nv": None, "": None},
)

_ROWS = (
    _TENSOR,
    replace(
        _TENSOR,
        name="row",
        scalings=("row",),
        tile=(1, 0),
        arguments={"num_bits": 8, "strategy": "channel"},
    ),
    _BLOCK,
    # scale_fmt="ue8m0".
    replace(
        _BLOCK,
        name="block_ue8m0",
        sources=(_transformers("integrations/finegrained_fp8"),),
        dtype=E8M0,
    ),
    _MXFP8,
    replace(
        _MXFP8,
        name="mxfp4",
        sources=(
            _compressed("mxfp4"),
            _vllm(f"{_SCHEME}w4a4_mxfp4", "ac2c03925ee4"),
            _BY_TRANSFORMERS,
        ),
        format="e2m1",
        values="{}_packed",
        style="mxfp4-pack-quantized",
        arguments=_MX | {"num_bits": 4},
        inputs={"mx": _MX | {"num_bits": 4, "dynamic": True}},
    ),
    # GPT-OSS' own files.
    Layout(
        name="mxfp4_blocks",
        sources=(
            _transformers("integrations/mxfp4"),
            Source(
                "vllm",
                "vllm-project/vllm",
                "vllm/model_executor/models/gpt_oss.py",
                "0025d69bcf08",
            ),
        ),
        scalings=("mx",),
        format="e2m1",
        values="{}_blocks",
        grouped=True,
        tile=(1, 32),
        scale="{}_scales",
        dtype=torch.uint8,
        stacked=True,
        method="mxfp4",
        inputs={"mx": None, "": None},
    ),
    _NVFP4,
    # Model-Optimizer's files. Those of algorithm "NVFP4" have a scale of the inputs beside.
    replace(
        _NVFP4,
        name="nvfp4_modelopt",
        sources=(
            _vllm("modelopt", "00155cdecca7"),
            Source(
                "model-optimizer",
                "NVIDIA/Model-Optimizer",
                "modelopt/torch/export/convert_hf_config.py",
                "0030d2b307ba",
            ),
        ),
        values="{}",
        divisor="",
        factor="{}_scale_2",
        method="modelopt",
        style="W4A16_NVFP4",
        arguments={"num_bits": 4, "type": "float", "group_size": 16},
    ),
    # Parameters on Hopper, and wherever scales stay float32.
    replace(
        _BLOCK,
        name="block_sm90",
        place="memory",
        sources=(_VLLM_FP8_UTILS, _SGLANG_FP8, _DEEPGEMM),
        fused=_FUSED,
        experts=_EXPERTS,
    ),
    # Parameters on Blackwell, for DeepGEMM.
    replace(
        _BLOCK,
        name="block_sm100",
        place="memory",
        sources=(_VLLM_FP8_UTILS, _sglang("fp8_utils", "002ed7e465ec"), _DEEPGEMM),
        dtype=torch.int32,
        order="packed",
        fused=_FUSED,
        experts=_EXPERTS,
    ),
    # Parameters of linear layers on Blackwell, for the kernels of CUTLASS and FlashInfer.
    replace(
        _NVFP4,
        name="nvfp4_sm100",
        place="memory",
        sources=(
            _vllm(f"{_SCHEME}w4a4_nvfp4", "85f1f913cf8d"),
            _vllm("utils/quant_utils", "01693a61cbed"),
            _SGLANG_NVFP4,
        ),
        order="swizzled",
        shared=(),
        fused=_FUSED,
    ),
)

LAYOUTS: dict[str, Layout] = {row.name: row for row in _ROWS}
"""Name -> layout. `fp8.export` writes the first one that has a recipe."""

_ALL_FORMS = [pair for row in _ROWS for pair in row.forms.items()]

FORMS: dict[str, tuple[str, ...]] = {
    part: tuple(dict.fromkeys(form for key, form in _ALL_FORMS if key == part))
    for part in ("values", "scale", "divisor", "factor")
}
"""Part of a weight -> all names that layouts have for it."""
