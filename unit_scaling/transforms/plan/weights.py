"""Scales and tags the parameters of a model for the optimizers of `unit_scaling.optim`."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized
from torch.nn.utils.prune import BasePruningMethod

from fp8.common.mixin import bare_class
from fp8.common.report import LEFT_ALONE
from fp8.selection.layers import holds_experts, why_quantized

from ...parameter import Tags, has_parameter_data, remember_tags, retag, tag, tags_of
from ...rules.rates import fan_in
from ..record.copies import package_of
from .plan import CallRow

Done = tuple[str, str]
"""What the report says was done, and why."""

SMALL = 0.5
"""A gain whose RMS is below this is scaled to RMS 1."""


def named_tags(model: nn.Module, path: str) -> dict[str, Tags]:
    """Parameter name -> its tags. path: the path of ``model`` itself."""
    named = model.named_parameters(prefix=path)
    return {name: tags_of(p) for name, p in named if has_parameter_data(p)}


def scaled(tags: Mapping[str, Tags]) -> frozenset[str]:
    """The weights and gains that were divided by their RMS."""
    return frozenset(name for name, each in tags.items() if each.mup_divisor)


@torch.no_grad()
def keep_values(
    model: nn.Module, path: str, names: Collection[str], added: Mapping[str, float]
) -> None:
    """Multiplies weights by their divisors; they have a static scale instead. A readout becomes a
    weight, as its product has no factor, and what is ``added`` to values of an RMS a bias."""
    parameters = dict(model.named_parameters(prefix=path))
    for name, parameter in parameters.items():
        divisor = tags_of(parameter).mup_divisor
        if name not in names or not divisor:
            continue
        parameter.mul_(divisor)
        tags = tags_of(parameter)._replace(mup_divisor=None)
        if name in added:
            tags = tags._replace(mup_type="bias", mup_scale=_nearest_power(added[name]))
        else:
            kind = "weight" if tags.mup_type == "output" else tags.mup_type
            tags = tags._replace(mup_type=kind, mup_scale=_nearest_power(divisor))
        retag(parameter, tags)
        _scale_bias(parameters, name)


def _scale_bias(parameters: Mapping[str, nn.Parameter], name: str) -> None:
    """Gives the bias of a layer whose weight has a static scale that of the layer's result: the
    layer is s * (u @ x / sqrt(n) + b / s) for a weight u of RMS 1 and s = mup_scale * sqrt(n)."""
    owner, dot, leaf = name.rpartition(".")
    bias = parameters.get(owner + dot + leaf.removesuffix("_orig").replace("weight", "bias"))
    weight = parameters[name]
    if bias is not None and bias is not weight and tags_of(weight).mup_type == "weight":
        scale = _nearest_power(tags_of(weight).mup_scale * fan_in(weight.shape) ** 0.5)
        tag(bias, *tags_of(bias)._replace(mup_scale=scale))


@torch.no_grad()
def adopt_tags(model: nn.Module, path: str, tags: Mapping[str, Tags], rescale: bool = True) -> None:
    """Gives the parameters of ``model`` the tags of those of a recorded one. rescale: also brings
    them to the values that its plan is for, after they were divided by their own RMS."""
    for name, parameter in model.named_parameters(prefix=path):
        if name in tags:
            ratio = (tags_of(parameter).mup_divisor or 1.0) / (tags[name].mup_divisor or 1.0)
            if rescale and ratio != 1:
                parameter.mul_(ratio)
            retag(parameter, tags[name])
    remember_tags(model)


def demoted(model: nn.Module, path: str, names: Collection[str]) -> list[CallRow]:
    """Tags as weights the parameters that were taken for the readout before the first call."""
    parameters = dict(model.named_parameters(prefix=path))
    for name in sorted(names):
        tag(parameters[name], "weight")
    split = (name.rpartition(".") for name in sorted(names))
    return [CallRow(owner, leaf, "tagged as weight", "not the readout") for owner, _, leaf in split]


def _nearest_power(rms: float) -> float:
    """The power of two next to an RMS, at most 32 octaves from 1."""
    return float(2.0 ** min(max(round(math.log2(rms)), -32), 32))


def prepare(model: nn.Module) -> list[CallRow]:
    """Tags all parameters of ``model``. The weight of the last `nn.Linear` is tagged as the
    readout, a matrix (two or more dimensions) is divided in place by its RMS, its tag
    ``mup_divisor``, and biases are set to zero."""
    rows: list[CallRow] = []
    readout, seen = _readout(model), set[int]()
    divided = {id(p) for p in model.parameters() if tags_of(p).mup_divisor}  # by an earlier call
    for path, module in model.named_modules():
        if package_of(bare_class(module)) == "unit_scaling":
            continue  # its parameters have RMS 1 and tags
        named = module.named_parameters(recurse=False)
        for leaf, parameter in sorted(named, key=lambda item: "bias" in item[0]):  # weights first
            if id(parameter) not in seen:
                seen.add(id(parameter))
                done = _prepared(module, leaf, parameter, parameter is readout, divided)
                rows += [] if done is None else [CallRow(path, leaf, *done)]
    remember_tags(model)
    return rows


@torch.no_grad()
def _prepared(
    module: nn.Module,
    leaf: str,
    parameter: nn.Parameter,
    is_readout: bool,
    divided: Collection[int],
) -> Done | None:
    stacked = holds_experts(module)
    if isinstance(module, ParametrizationList):
        tag(parameter, "weight" if parameter.dim() > 1 else "norm")
        return "unchanged", "parametrized: keeps its values"
    if parameter.dim() - stacked > 1 and not _is_gain(parameter):
        tag(parameter, "output" if is_readout else "weight", mup_stacked=stacked)
        return _rescale(parameter)
    if leaf.endswith("bias") or leaf.startswith("bias_"):  # recurrent layers have bias_ih_l0
        tag(parameter, "bias")
        if parameter.is_meta or not bool(parameter.any()):
            return None
        if _has_offset(parameter):
            return "unchanged", "its mean is not zero"
        if size := _result_size(module, leaf, divided):
            parameter.div_(size)
            return "unit scale", f"divided by {size:.4g}, as its layer's result"
        parameter.zero_()
        return "set to zero", "rule of biases"
    tag(parameter, "norm")
    return None if isinstance(module, nn.PReLU) else _unit_gain(parameter)  # slopes are no gains


FEW_INPUTS = 16
"""From here on a bias of torch, 1/sqrt(fan_in) of its layer's result in RMS, is small."""


def _result_size(module: nn.Module, bias: str, divided: Collection[int]) -> float | None:
    """By what the result of a layer of few inputs is divided with its weight; None for others."""
    parameters = dict(module.named_parameters(recurse=False))
    name = bias.replace("bias", "weight")
    weight = parameters.get(name, parameters.get(f"{name}_orig"))
    divisor = None if weight is None else tags_of(weight).mup_divisor
    if weight is None or weight.dim() < 2 or not divisor or not bool(weight.any()):
        return None
    inputs = fan_in(weight.shape)
    size = 1.0 if id(weight) in divided else divisor * inputs**0.5
    return size if inputs < FEW_INPUTS else None


def _has_offset(bias: nn.Parameter) -> bool:
    """Whether the mean of a bias differs from zero by four standard errors, or it is one number. It
    is then no noise, as torch's is, but set: for a forget gate, a time step or a rare class."""
    mean, rms = bias.double().mean().abs(), bias.double().square().mean().sqrt()
    return bool(mean > 4 * rms / bias.numel() ** 0.5) or (bias.numel() > 1 and _is_one_number(bias))


def pruned(module: nn.Module) -> dict[str, str]:
    """Parameter masked by `torch.nn.utils.prune` -> the name of the masked weight."""
    names = (n.removesuffix("_orig") for n, _ in module.named_parameters(recurse=False))
    return {f"{n}_orig": n for n in names if hasattr(module, f"{n}_mask")}


def refuse_weights(model: nn.Module, quantized: bool = False) -> None:
    """Raises ValueError for weights that a hook other than pruning computes before each call, and
    for quantized ones unless they are allowed."""
    for path, module in model.named_modules():
        if not quantized and (why := why_quantized(module)):
            raise ValueError(f"{path or 'the model'} is {why}; unit-scale the model before that")
        for hook in module._forward_pre_hooks.values():
            masks = isinstance(hook, BasePruningMethod)
            if type(hook).__module__.startswith("torch.nn.utils.") and not masks:
                raise ValueError(
                    f"{path or 'the model'} has its weight computed by a hook "
                    f"({type(hook).__name__}): use torch.nn.utils.parametrizations instead"
                )


def refuse_split(model: nn.Module) -> None:
    """Raises ValueError for a weight that was divided by its RMS, and that a parametrization with
    new parameters (`weight_norm`) computes now."""
    for path, part in model.named_modules():
        for name, tags in getattr(part, "mup_tags", {}).items():
            if not (tags.mup_divisor and is_parametrized(part, name)):
                continue
            parts = part.get_submodule(f"parametrizations.{name}")
            if not any(map(has_parameter_data, parts.parameters(recurse=False))):
                raise ValueError(
                    f"{path or 'the model'} has a parametrization of its {name} that came between "
                    "unit_scale and the first call: register it before unit_scale"
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
    return weight if any(p.dim() > 1 and p is not weight for p in layers) and not tied else None


def _is_gain(parameter: nn.Parameter) -> bool:
    """Whether a parameter is constant along its only dimension, as layer scales are: (1, 1, n)."""
    along = not parameter.is_meta and parameter.numel() == max(parameter.shape)
    return along and parameter.numel() > 0 and _is_one_number(parameter)


def _is_one_number(parameter: nn.Parameter) -> bool:
    return bool((parameter == parameter.flatten()[0]).all())


def _rescale(parameter: nn.Parameter) -> Done:
    """Divides a weight by its RMS."""
    if parameter.is_meta:
        return LEFT_ALONE, "has no values yet (meta device)"
    if not parameter.numel():
        return "unchanged", "is empty"
    if not bool(parameter.any()):  # has the factor that its learning rate is for
        tag(parameter, *tags_of(parameter)._replace(mup_divisor=1.0))
        return "unchanged", "starts at zeros"
    if _is_one_number(parameter):
        return LEFT_ALONE, f"is {parameter.flatten()[0].item():.4g} everywhere"
    rms = parameter.abs().double().square().mean().sqrt().item() or 1.0
    if not math.isfinite(rms):
        return LEFT_ALONE, "holds Inf or NaN"
    return _divided(parameter, rms)


def _divided(parameter: nn.Parameter, rms: float, what: str = "") -> Done:
    parameter.div_(rms)
    tags = tags_of(parameter)
    tag(parameter, *tags._replace(mup_scale=1.0, mup_divisor=(tags.mup_divisor or 1.0) * rms))
    return "unit scale", f"{what}divided by {rms:.4g}"


def _unit_gain(parameter: nn.Parameter) -> Done | None:
    """Scales a gain to RMS 1 if it is a small or large constant, such as 1e-6, or small noise."""
    if parameter.is_meta or parameter.numel() < 2:
        return None
    rms = parameter.double().square().mean().sqrt().item()
    same = bool(parameter.abs().min() == parameter.abs().max())
    far = 0 < rms < SMALL or (same and 2 < rms < math.inf)
    return _divided(parameter, rms, "a gain, ") if far else None
