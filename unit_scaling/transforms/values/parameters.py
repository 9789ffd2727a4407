"""The tags of parameters and the first numbers that they are multiplied by, from kind and values:
weights to RMS 1, biases to zero."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.prune import BasePruningMethod

from fp8.common.dtensor import whole
from fp8.common.mixin import bare_class
from fp8.common.report import LEFT_ALONE
from fp8.layers.select import holds_experts, why_quantized

from ...parameter import Tags
from ...rules.rates import fan_in
from ..record.calls import package_of
from ..record.values import is_any

SMALL = 0.5
"""A gain whose RMS is below this is scaled to RMS 1."""

FEW_INPUTS = 16
"""From here on a bias of torch, 1/sqrt(fan_in) of its layer's result in RMS, is small."""


@dataclass(frozen=True)
class Start:
    """What is done with a parameter before a pass: its tags, the number that it is multiplied by,
    and what the report says; "" for no row."""

    tags: Tags
    number: float = 1.0
    done: str = ""
    why: str = ""


def starts_of(model: nn.Module) -> dict[str, Start]:
    """Returns the `Start` of each parameter by name. Modules of `unit_scaling` are left out: their
    parameters have RMS 1 and tags. The weight of the last `nn.Linear` is tagged as the readout.
    """
    starts: dict[str, Start] = {}
    readout = _readout(model)
    visited = set[int]()
    for path, module in model.named_modules():
        if package_of(bare_class(module)) == "unit_scaling":
            continue
        own = dict(module.named_parameters(recurse=False))
        # A bias is divided as its weight, which comes first.
        for leaf in sorted(own, key=lambda leaf: "bias" in leaf):
            if id(own[leaf]) not in visited:
                visited.add(id(own[leaf]))
                starts[joined(path, leaf)] = _start(module, path, leaf, readout, starts)
    return starts


def joined(path: str, leaf: str) -> str:
    """The name of a parameter of the module at ``path``."""
    if path:
        return f"{path}.{leaf}"
    return leaf


@torch.no_grad()
def _start(
    module: nn.Module,
    path: str,
    leaf: str,
    readout: Tensor | None,
    others: Mapping[str, Start],
) -> Start:
    parameter = dict(module.named_parameters(recurse=False))[leaf]
    stacked = holds_experts(module)
    if isinstance(module, ParametrizationList):
        tags = Tags("weight" if parameter.dim() > 1 else "norm")
        return Start(tags, done="unchanged", why="parametrized: keeps its values")
    if parameter.dim() - stacked > 1 and not _is_gain(parameter):
        tags = Tags("output") if parameter is readout else Tags("weight")
        return _of_weight(parameter, tags._replace(mup_stacked=stacked))
    if leaf.endswith("bias") or leaf.startswith(
        "bias_"
    ):  # recurrent layers have bias_ih_l0
        return _of_bias(module, path, leaf, others)
    # The slopes of a PReLU are no gains.
    if isinstance(module, nn.PReLU):
        return Start(Tags("norm"))
    return _of_gain(parameter)


def _of_weight(parameter: nn.Parameter, tags: Tags) -> Start:
    """A weight, which is divided by its RMS."""
    if parameter.is_meta:
        return Start(tags, done=LEFT_ALONE, why="has no values yet (meta device)")
    if not parameter.numel():
        return Start(tags, done="unchanged", why="is empty")
    if not is_any(parameter):  # has the factor that its learning rate is for
        return Start(
            tags._replace(mup_divisor=1.0), done="unchanged", why="starts at zeros"
        )
    if _is_one_number(parameter):
        value = whole(parameter.detach()).flatten()[0].item()
        return Start(tags, done=LEFT_ALONE, why=f"is {value:.4g} everywhere")
    rms = _rms(parameter) or 1.0
    if not math.isfinite(rms):
        return Start(tags, done=LEFT_ALONE, why="holds Inf or NaN")
    return Start(tags._replace(mup_divisor=rms), 1 / rms)


def _of_bias(
    module: nn.Module, path: str, leaf: str, others: Mapping[str, Start]
) -> Start:
    """A bias: zeros, unless it is no noise. That of a layer of few inputs is divided as its weight:
    the product multiplies both."""
    bias, tags = dict(module.named_parameters(recurse=False))[leaf], Tags("bias")
    if bias.is_meta or not is_any(bias):
        return Start(tags)
    if _has_offset(bias):
        return Start(tags, done="unchanged", why="its mean is not zero")
    parameters = dict(module.named_parameters(recurse=False))
    name = leaf.replace("bias", "weight")
    if name not in parameters:
        name = f"{name}_orig"
    weight, start = parameters.get(name), others.get(joined(path, name))
    if weight is not None and start is not None and start.number != 1.0:
        inputs = fan_in(weight.shape)
        if weight.dim() > 1 and inputs < FEW_INPUTS:
            return Start(tags, start.number)
    return Start(tags, 0.0, "set to zero", "rule of biases")


def _of_gain(parameter: nn.Parameter) -> Start:
    """A gain, which is scaled to RMS 1 if it is a small or large constant, such as 1e-6, or small
    noise."""
    tags = Tags("norm")
    if parameter.is_meta or parameter.numel() < 2:
        return Start(tags)
    rms = _rms(parameter)
    same = bool(whole(parameter.abs().min() == parameter.abs().max()))
    far = 0 < rms < SMALL or (same and 2 < rms < math.inf)
    if far:
        return Start(tags._replace(mup_divisor=rms), 1 / rms)
    return Start(tags)


def _has_offset(bias: nn.Parameter) -> bool:
    """Whether the mean of a bias differs from zero by four standard errors, or it is one number. It
    is then no noise, as torch's is, but set: for a forget gate, a time step or a rare class."""
    mean = abs(whole(bias.detach().double().sum()).item()) / bias.numel()
    is_offset = mean > 4 * _rms(bias) / bias.numel() ** 0.5
    return is_offset or (bias.numel() > 1 and _is_one_number(bias))


def pruned(module: nn.Module) -> dict[str, str]:
    """Parameter masked by `torch.nn.utils.prune` -> the name of the masked weight."""
    names = (n.removesuffix("_orig") for n, _ in module.named_parameters(recurse=False))
    return {f"{n}_orig": n for n in names if hasattr(module, f"{n}_mask")}


def refuse_weights(model: nn.Module) -> None:
    """Raises ValueError for quantized weights, and for those that a hook other than pruning
    computes before each call."""
    for path, module in model.named_modules():
        if why := why_quantized(module):
            raise ValueError(
                f"{path or 'the model'} is {why}; unit-scale the model before that"
            )
        for hook in module._forward_pre_hooks.values():
            masks = isinstance(hook, BasePruningMethod)
            if type(hook).__module__.startswith("torch.nn.utils.") and not masks:
                raise ValueError(
                    f"{path or 'the model'} has its weight computed by a hook "
                    f"({type(hook).__name__}): use torch.nn.utils.parametrizations instead"
                )


def _readout(model: nn.Module) -> Tensor | None:
    """The last linear layer's weight; None if another module shares it, or if no other layer has
    weights besides embeddings."""
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if not linears:
        return None
    name = "weight_orig" if "weight_orig" in pruned(linears[-1]) else "weight"
    # Not as an attribute: computing a parametrized weight may change buffers (spectral_norm).
    weight = dict(linears[-1].named_parameters(recurse=False)).get(name)
    if weight is None:
        return None
    owners = [(m, p) for m in model.modules() for p in m.parameters(recurse=False)]
    tied = sum(p is weight for _, p in owners) > 1
    layers = [p for m, p in owners if not isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    if any(p.dim() > 1 and p is not weight for p in layers) and not tied:
        return weight
    return None


def _is_gain(parameter: nn.Parameter) -> bool:
    """Whether a parameter is constant along its only dimension, as layer scales are: (1, 1, n)."""
    along = not parameter.is_meta and parameter.numel() == max(parameter.shape)
    return along and parameter.numel() > 0 and _is_one_number(parameter)


def _rms(parameter: nn.Parameter) -> float:
    # Not by the mean: that of parts of different lengths is wrong in torch.
    total: float = whole(parameter.detach().abs().double().square().sum()).item()
    return math.sqrt(total / parameter.numel())


def _is_one_number(parameter: nn.Parameter) -> bool:
    values = whole(parameter.detach())
    return bool((values == values.flatten()[0]).all())
