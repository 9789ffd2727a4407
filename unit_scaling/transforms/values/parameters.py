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

from ...parameter import MupType, Tags
from ...rules.rates import fan_in
from ..record.values import in_double, is_any

SMALL = 0.5
"""A gain whose RMS is below this is scaled to RMS 1."""

FEW_INPUTS = 16
"""From here on a bias of torch, 1/sqrt(fan_in) of its layer's result in RMS, is small."""


@dataclass
class Change:
    """What is done with the values w of a parameter: (shift + start * w) * number - shift, and its
    tags.

    start: brings a weight to RMS 1. number: what its learning rate is in proportion to. done, why:
    what the report says of the start; "" for no row. keeps: whether the values stay, and only the
    learning rate has the number.
    """

    tags: Tags
    start: float = 1.0
    done: str = ""
    why: str = ""
    number: float = 1.0
    shift: float = 0.0
    keeps: bool = False

    @property
    def is_set(self) -> bool:
        """Whether the values change."""
        return not self.keeps and self.start * self.number != 1.0

    @torch.no_grad()
    def values(self, plain: Tensor) -> Tensor:
        """The new values, rounded once."""
        if self.keeps:
            return plain
        wide = in_double(plain)
        if self.shift:
            wide = (wide * self.start + self.shift) * self.number - self.shift
        else:
            wide = wide * (self.start * self.number)
        return wide.to(plain.dtype)

    @torch.no_grad()
    def apply(self, parameter: nn.Parameter) -> None:
        """Sets the values of a parameter that has its plain ones."""
        if self.is_set:
            parameter.copy_(self.values(parameter.detach()))


def starts_of(model: nn.Module) -> dict[str, Change]:
    """Returns the first `Change` of each parameter by name. Modules of `unit_scaling` are left out:
    their parameters have RMS 1 and tags. The weight of the last `nn.Linear` is tagged as the
    readout.
    """
    starts: dict[str, Change] = {}
    readout = _readout(model)
    visited = set[int]()
    for path, module in model.named_modules():
        if bare_class(module).__module__.startswith("unit_scaling."):
            continue
        own = own_parameters(module)
        # A bias is divided as its weight, which comes first.
        for leaf in sorted(own, key=lambda leaf: "bias" in leaf):
            if id(own[leaf]) not in visited:
                visited.add(id(own[leaf]))
                starts[joined(path, leaf)] = _start(module, path, leaf, readout, starts)
    return starts


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a module without those of its parts."""
    return dict(module.named_parameters(recurse=False))


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
    others: Mapping[str, Change],
) -> Change:
    """What becomes of the values of the parameter ``leaf`` of a module, by its shape and name."""
    parameter = own_parameters(module)[leaf]
    stacked = holds_experts(module)
    if isinstance(module, ParametrizationList):
        tags = Tags("weight" if parameter.dim() > 1 else "norm")
        return Change(tags, done="unchanged", why="parametrized: keeps its values")
    if parameter.dim() - stacked > 1 and not _is_gain(parameter):
        return _of_weight(parameter, readout, stacked)
    # Recurrent layers have bias_ih_l0.
    if leaf.endswith("bias") or leaf.startswith("bias_"):
        return _of_bias(module, path, leaf, others)
    # The slopes of a PReLU are no gains.
    if isinstance(module, nn.PReLU):
        return Change(Tags("norm"))
    return _of_gain(parameter)


def weight_start(model: nn.Module, parameter: nn.Parameter) -> Change:
    """The first `Change` of a parameter that products read as a weight."""
    return _of_weight(parameter, _readout(model))


def _of_weight(
    parameter: nn.Parameter, readout: Tensor | None, stacked: bool = False
) -> Change:
    """A weight, which is divided by its RMS."""
    kind: MupType = "output" if parameter is readout else "weight"
    tags = Tags(kind, mup_stacked=stacked)
    if parameter.is_meta:
        return Change(tags, done=LEFT_ALONE, why="has no values yet (meta device)")
    if not parameter.numel():
        return Change(tags, done="unchanged", why="is empty")
    if not is_any(parameter):  # has the factor that its learning rate is for
        tags = tags._replace(mup_divisor=1.0)
        return Change(tags, done="unchanged", why="starts at zeros")
    if parameter.numel() > 1 and _is_one_number(parameter):
        value = whole(parameter.detach()).flatten()[0].item()
        return Change(tags, done=LEFT_ALONE, why=f"is {value:.4g} everywhere")
    rms = _rms(parameter) or 1.0
    if not math.isfinite(rms):
        return Change(tags, done=LEFT_ALONE, why="holds Inf or NaN")
    return Change(tags._replace(mup_divisor=rms), 1 / rms)


def _of_bias(
    module: nn.Module, path: str, leaf: str, others: Mapping[str, Change]
) -> Change:
    """A bias: zeros, unless it is no noise. That of a layer of few inputs is divided as its weight:
    the product multiplies both."""
    parameters = own_parameters(module)
    tags = Tags("bias")
    bias = parameters[leaf]
    name = leaf.replace("bias", "weight")
    if bias.is_meta or not is_any(bias):
        return Change(tags)
    if _has_offset(bias):
        return Change(tags, done="unchanged", why="its mean is not zero")
    if name not in parameters:
        name = f"{name}_orig"
    weight = parameters.get(name)
    start = others.get(joined(path, name), Change(tags))
    is_divided = weight is not None and weight.dim() > 1 and start.start != 1.0
    # Set to zero, such biases left a RealNVP at a loss of -0.5 in place of -1.3.
    if is_divided and fan_in(parameters[name].shape) < FEW_INPUTS:
        return Change(tags, start.start)
    return Change(tags, 0.0, "set to zero", "rule of biases")


def _of_gain(parameter: nn.Parameter) -> Change:
    """A gain, which is scaled to RMS 1 if it is a small or large constant, such as 1e-6, or small
    noise."""
    tags = Tags("norm")
    if parameter.is_meta or parameter.numel() < 2:
        return Change(tags)
    # No product makes up for a small gain that keeps its values.
    rms = _rms(parameter)
    same = bool(whole(parameter.abs().min() == parameter.abs().max()))
    far = 0 < rms < SMALL or (same and 2 < rms < math.inf)
    if far:
        return Change(tags._replace(mup_divisor=rms), 1 / rms)
    return Change(tags)


def _has_offset(bias: nn.Parameter) -> bool:
    """Whether the mean of a bias differs from zero by four standard errors, or it is one number. It
    is then no noise, as torch's is, but set: for a forget gate, a time step or a rare class."""
    count = bias.numel()
    mean = abs(whole(bias.detach().double().sum()).item()) / count
    is_offset = mean > 4 * _rms(bias) / count**0.5
    return is_offset or (count > 1 and _is_one_number(bias))


def refuse_weights(model: nn.Module) -> None:
    """Raises ValueError for quantized weights, and for those that a hook other than pruning
    computes before each call."""
    for path, module in model.named_modules():
        if why := why_quantized(module):
            raise ValueError(
                f"{path or 'the model'} is {why}; unit-scale the model before that"
            )
        for kind in map(type, module._forward_pre_hooks.values()):
            masks = issubclass(kind, BasePruningMethod)
            if kind.__module__.startswith("torch.nn.utils.") and not masks:
                raise ValueError(
                    f"{path or 'the model'} has its weight computed by a hook "
                    f"({kind.__name__}): use torch.nn.utils.parametrizations instead"
                )


def _readout(model: nn.Module) -> Tensor | None:
    """The last linear layer's weight; None if another module shares it, or if no other layer has
    weights besides embeddings."""
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if not linears:
        return None
    # Not as an attribute: computing a parametrized weight may change buffers (spectral_norm).
    own = own_parameters(linears[-1])
    weight = own.get(
        "weight", own.get("weight_orig")
    )  # torch.nn.utils.prune renames it
    owners = 0
    is_only = True
    for module in model.modules():
        for p in module.parameters(recurse=False):
            owners += p is weight
            is_table = isinstance(module, nn.Embedding | nn.EmbeddingBag)
            is_only &= p is weight or is_table or p.dim() < 2
    return None if is_only or owners > 1 else weight


def _is_gain(parameter: nn.Parameter) -> bool:
    """Whether a parameter is constant along its only dimension, as layer scales are: (1, 1, n). So
    are weights of zeros with one output, which calls tell apart."""
    if parameter.is_meta or not parameter.numel():
        return False
    return parameter.numel() == max(parameter.shape) and _is_one_number(parameter)


def _rms(parameter: nn.Parameter) -> float:
    # Not by the mean: that of parts of different lengths is wrong in torch.
    squares = parameter.detach().abs().double().square()
    return math.sqrt(whole(squares.sum()).item() / parameter.numel())


def _is_one_number(parameter: nn.Parameter) -> bool:
    values = whole(parameter.detach())
    return bool((values == values.flatten()[0]).all())
