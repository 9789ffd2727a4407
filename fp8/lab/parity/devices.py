"""Tensor parallelism: layers whose inputs several devices share.

A device multiplies a slice of the inputs by its columns of the weight. It casts the slice alone, so
that the scale of a token is that of the slice; the weight has the scales of the file. Its partial
output is rounded to the dtype of the model, and an all-reduce adds the partial outputs. The first
device adds the bias. Layers whose outputs are split, and embeddings, compute the same as on one
device. Sources: `RowParallelLinear` of vllm-project/vllm, vllm/model_executor/layers/linear.py
(0036d38d), and of sgl-project/sglang, python/sglang/srt/layers/linear.py (0079fcc1).

Layers of fp8 under `torch.distributed.tensor.parallel` differ: each process casts its slice at the
scales of whole tokens, and torch gives each an equal part of the bias.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...common.mixin import Args, Forward, Mixin, add_mixin
from ...common.validation import check_choice, check_whole
from ...layers.policies import matches
from ...layers.settings import Converted
from ...recipes.tensor_cores import TENSOR_CORES
from ...torch_internals import Keywords


def _once(parts: list[Tensor]) -> Tensor:
    dtype = parts[0].dtype
    total = parts[0].to(torch.promote_types(dtype, torch.float32))
    for part in parts[1:]:
        total = total + part
    return total.to(dtype)


def _ring(parts: list[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


REDUCTIONS: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "once": _once,
    "ring": _ring,
}
"""`Engine.reduction` -> the sum of the partial outputs of devices. "once": in float32, in the order
of the devices, rounded once, as in the custom all-reduce of vLLM (csrc/custom_all_reduce.cuh,
c9eabec7) and SGLang (sgl-kernel/csrc/allreduce/custom_all_reduce.cuh, 5a56108f), for messages below
8 MB within a node. Those from 512 kB on (256 kB for more than four devices) begin each part with
another device, which has an effect only where float32 rounds. "ring": rounded to the dtype at each
step, as by NCCL (src/device/all_reduce.h, 0e35f5d3; reduce_kernel.h, b6475625). NCCL, too, begins
each part with another device, and here the first one begins all: of two devices the order has no
effect. Not here: kernels that add and normalize at once, which vLLM takes for few tokens on Hopper
(docs.vllm.ai, design/fusions, "AllReduce + RMSNorm")."""


@dataclass(frozen=True)
class Devices:
    """The devices that share layers. count: their number. layers: the names of the layers whose
    inputs are split. reduction: a name in `REDUCTIONS`."""

    count: int = 1
    layers: tuple[str, ...] = ()
    reduction: str = "once"

    @staticmethod
    def of(
        model: nn.Module, count: int, split: Iterable[str] | None, reduction: str
    ) -> Devices:
        """The devices that share a model. split: as in `split_layers`."""
        check_whole("devices", count)
        check_choice("reduction", reduction, REDUCTIONS)
        layers: tuple[str, ...] = ()
        if count > 1:
            layers = split_layers(model, split)
        return Devices(count, layers, reduction)

    def share(self, model: nn.Module) -> None:
        """Splits the layers of a model, in place. Raises ValueError for inputs that cannot be
        split into whole blocks."""
        for name in self.layers:
            layer: Any = model.get_submodule(name)
            block = _block(layer)
            if layer.in_features % (self.count * block):
                raise ValueError(
                    f"{self.count} devices cannot split the {layer.in_features} inputs of {name} "
                    f"into whole blocks of {block}"
                )
            vars(layer)["_devices"] = self
            add_mixin(layer, Shared)


ONE = Devices()
"""One device, which has whole layers."""


def _block(layer: nn.Module) -> int:
    """The number of inputs of a layer that a scale, a rotation or a sum ties together."""
    if not isinstance(layer, Converted):
        return 1
    recipe = layer.fp8_recipe
    sizes = [recipe.promote]
    if recipe.accumulate in TENSOR_CORES:
        sizes.append(TENSOR_CORES[recipe.accumulate].step)
    for cast in recipe.forward:
        if cast is not None:
            sizes += [cast.tile[1], cast.hadamard]
    # 0 is none.
    return math.lcm(*filter(None, sizes))


def split_layers(model: nn.Module, split: Iterable[str] | None) -> tuple[str, ...]:
    """The names of the linear layers whose inputs devices split.

    split: patterns of names, as those of `fp8.LayerRule`; None: what the tensor-parallel plan of
    the model (``tp_plan`` of transformers) says. Raises ValueError for a pattern without a linear
    layer, for a model without a plan, and for one that splits other parts, such as experts: their
    devices add up what several experts return.
    """
    kind = type(model).__name__
    parts: dict[str, object] = {**dict(model.named_modules())}
    parts |= dict(model.named_parameters())
    patterns = _planned(model) if split is None else list(split)
    layers: dict[str, None] = {}
    for pattern in patterns:
        found = [name for name in parts if matches(pattern, name)]
        linear = [name for name in found if isinstance(parts[name], nn.Linear)]
        layers |= dict.fromkeys(linear)
        if split is not None and not linear:
            raise ValueError(f"split={pattern!r} matches no nn.Linear of {kind}")
        for name in found:
            if split is None and not isinstance(parts[name], nn.Linear | nn.Embedding):
                raise ValueError(
                    f"the plan of {kind} splits {name}, which is no nn.Linear: {_NAME_THEM}"
                )
    if not layers:
        raise ValueError(
            f"{kind} has no plan of layers that devices split: {_NAME_THEM}"
        )
    return tuple(layers)


_NAME_THEM = (
    "name the layers whose inputs they split, such as split=['*.o_proj', '*.down_proj']"
)


def _planned(model: nn.Module) -> list[str]:
    patterns = []
    for path, module in model.named_modules():
        plan = getattr(module, "tp_plan", None)
        if isinstance(plan, Mapping):
            names = [name for name, how in plan.items() if "rowwise" in str(how)]
            patterns += [f"{path}.{name}".removeprefix(".") for name in names]
    return patterns


class Shared(Mixin):
    """A linear layer that several devices share."""

    _attributes = ("_devices",)
    _devices: Devices

    def around(self: Any, forward: Forward, args: Args, kwargs: Keywords) -> Tensor:
        (x,) = (*args, *kwargs.values())
        devices, bias = self._devices, self.bias
        size = self.in_features // devices.count
        parts = []
        try:
            for start in range(0, self.in_features, size):
                # Zeros beside the slice change neither its scales nor the sum.
                mine, columns = torch.zeros_like(x), slice(start, start + size)
                mine[..., columns] = x[..., columns]
                parts.append(forward(mine))
                self.bias = None
        finally:
            self.bias = bias
        return REDUCTIONS[devices.reduction](parts)
