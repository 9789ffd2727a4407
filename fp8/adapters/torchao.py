"""torchao: converts models to its Float8Linear and MXFP8Linear under our recipes, and back."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import torch
from torch import nn

from ..common.libraries import need
from ..common.mixin import add_mixin, bare_class
from ..formats.format import get_format
from ..native.kernels import ALIGNMENT, why_not_device
from ..recipes.cast import Cast
from ..recipes.recipe import AUTO, RECIPES, Recipe, recipe_unless_auto
from ..selection.layers import Where, checked_where
from ..surgery.swap import Padded, layers_for, swap, why_not_fit

__all__ = ["ao_config", "convert", "revert"]

_GRANULARITIES = {"tensor": "TENSORWISE", "row": "AXISWISE"}
_MX_BLOCK = 32


def ao_config(recipe: str | Recipe, *, emulate: bool = False) -> Any:
    """torchao's configuration for one of our recipes.

    Recipes with the scalings "tensor" and "row" become a Float8LinearConfig, "mxfp8" an
    MXFP8TrainingOpConfig. Scales are powers of two under rule "up", else exact.

    Args:
        recipe: a name or a `Recipe`.
        emulate: whether to compute from dequantized operands, on any device.

    Returns:
        The configuration.

    Raises:
        ValueError: if torchao has no such configuration, and for "mxfp8" in versions without it.
        ImportError: without torchao.
    """
    chosen = recipe_unless_auto(recipe) or RECIPES["tensor"]
    if dataclasses.replace(chosen, name="mxfp8") == RECIPES["mxfp8"]:
        return _mx_config(emulate)
    lib = need("torchao")
    rules = {cast.rule for cast in chosen.casts if cast is not None}
    config = importlib.import_module("torchao.float8.config")
    unknown = ValueError(
        f"torchao has no configuration for recipe {chosen.name!r}; it has 'tensor', 'row', "
        "'row_gw_hp' and 'mxfp8'"
    )
    if rules not in ({"up"}, {"exact"}) or chosen.saved_activations is not None:
        raise unknown

    def in_product(cast: Cast | None, other: Cast | None) -> Any:
        """torchao's cast of an operand in a product. other: that in its other product."""
        example = cast or other
        if example is None or example.format not in ("e4m3", "e5m2"):
            raise unknown
        dtype = get_format(example.format).dtype
        if cast is None:
            return config.CastConfig(scaling_type=config.ScalingType.DISABLED, target_dtype=dtype)
        plain = Cast(format=cast.format, scaling=cast.scaling, rule=cast.rule)
        if cast != plain or cast.scaling not in _GRANULARITIES:
            raise unknown
        granularity = config.ScalingGranularity[_GRANULARITIES[cast.scaling]]
        return config.CastConfig(scaling_granularity=granularity, target_dtype=dtype)

    weight, weight_again = chosen.weight, chosen.grad_input[1]
    grad_again, input_again = chosen.grad_weight
    return lib.Float8LinearConfig(
        cast_config_input=in_product(chosen.input, input_again),
        cast_config_input_for_grad_weight=in_product(input_again, chosen.input),
        cast_config_weight=in_product(weight, weight_again),
        cast_config_weight_for_grad_input=in_product(weight_again, weight),
        cast_config_grad_output=in_product(chosen.grad, grad_again),
        cast_config_grad_output_for_grad_weight=in_product(grad_again, chosen.grad),
        round_scales_to_power_of_2="up" in rules,
        pad_inner_dim=True,
        emulate=emulate,
    )


def _mx_config(emulate: bool) -> Any:
    need("torchao")
    try:
        moe = importlib.import_module("torchao.prototype.moe_training.config")
        importlib.import_module("torchao.prototype.moe_training.mxfp8_linear")
    except ImportError as error:
        raise ValueError("this version of torchao has no MXFP8Linear") from error
    preference = moe.KernelPreference
    return moe.MXFP8TrainingOpConfig(
        kernel_preference=preference.EMULATED if emulate else preference.AUTO,
        scale_calculation_mode=moe.ScaleCalculationMode.RCEIL,
        wgrad_with_hp=False,
    )


def convert(
    model: nn.Module,
    recipe: Any = AUTO,
    *,
    where: Where | None = None,
    emulate: bool | None = None,
) -> nn.Module:
    """Replaces nn.Linear with torchao's layers; `fp8.convert` with backend="torchao".

    Hooks, the training flag, names and attributes, some of which torchao's
    ``convert_to_float8_training`` loses, are preserved, and `fp8.report` lists every layer. Layers
    with sizes that are not multiples of 16 (32 for "mxfp8") are left alone unless emulated.

    Args:
        model: changed in place.
        recipe: a name, a `Recipe`, or a configuration of torchao's; see `ao_config`. "auto" is
            "tensor", because the converted layers are torch's, which are not unit-scaled.
        where: (name, layer) -> whether to convert it; None converts every layer.
        emulate: for our recipes; None: only if the model's device has no kernels.

    Returns:
        ``model``; if it is itself a layer, the layer that replaces it.

    Raises:
        ImportError: without torchao.
        ValueError: for ``enable_fsdp_float8_all_gather``, which replaces each weight by another
            parameter, so that ties and optimizers would keep the old one.
    """
    config, where = its_recipe(recipe), checked_where(where)
    if isinstance(recipe, str | Recipe):
        emulate = not _has_kernels(model, _is_mx(config)) if emulate is None else emulate
        config = ao_config(recipe, emulate=emulate)
    elif getattr(config, "enable_fsdp_float8_all_gather", False):
        raise ValueError(
            "enable_fsdp_float8_all_gather must be False: it replaces parameters, which neither "
            "ties nor optimizers follow; fp8.distributed.fsdp.gather_in_fp8 gathers weights in FP8"
        )
    emulated = config.kernel_preference == "emulated" if _is_mx(config) else config.emulate
    multiple = _MX_BLOCK if _is_mx(config) else 1 if emulated else ALIGNMENT

    def make(module: Any) -> nn.Module | str:
        return why_not_fit(module, multiple) or _layer(module, config)

    how = "torchao, " + ("MXFP8Linear" if _is_mx(config) else "Float8Linear")
    how += ", emulated" if emulated else ""
    layers = layers_for(model, (nn.Linear,), where, make, "torchao replaces linear layers")
    return swap(model, layers, adapter="torchao", how=how)


def its_recipe(recipe: Any) -> Any:
    """torchao's configuration for a name or a `Recipe`; one of its own unchanged."""
    return ao_config(recipe) if isinstance(recipe, str | Recipe) else recipe


def _is_mx(config: Any) -> bool:
    return type(config).__name__ == "MXFP8TrainingOpConfig"


def _has_kernels(model: nn.Module, mx: bool) -> bool:
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if not mx:
        return not why_not_device(device)
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (10, 0)


def _layer(module: nn.Linear, config: Any) -> nn.Module:
    if not _is_mx(config):
        return need("torchao").convert_to_float8_training(module, config=config)
    library = importlib.import_module("torchao.prototype.moe_training.mxfp8_linear")
    layer = library.MXFP8Linear(
        module.in_features,
        module.out_features,
        bias=module.bias is not None,
        device="meta",
        kernel_preference=config.kernel_preference,
        scale_calculation_mode=config.scale_calculation_mode,
        wgrad_with_hp=config.wgrad_with_hp,
    )
    add_mixin(layer, Padded)
    layer.fp8_multiple = _MX_BLOCK
    return layer


def revert(model: nn.Module) -> nn.Module:
    """Replaces torchao's layers, whatever created them, with nn.Linear with the same parameters.

    Args:
        model: changed in place.

    Returns:
        ``model``; if it is itself such a layer, the layer that replaces it.

    Raises:
        ImportError: without torchao.
    """
    need("torchao")

    def make(name: str, module: nn.Module) -> nn.Module | None:
        kind = bare_class(module)
        if not kind.__module__.startswith("torchao.") or not isinstance(module, nn.Linear):
            return None
        if "weight" not in dict(module.named_parameters(recurse=False)):
            return None
        bias = module.bias is not None
        return nn.Linear(module.in_features, module.out_features, bias=bias, device="meta")

    return swap(model, make)
