"""torchao: converts models to its Float8Linear under our recipes, and back."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from ..common.libraries import need
from ..common.mixin import bare_class
from ..kernels.kernel import ALIGNMENT, why_not_device
from ..layers.select import Where, checked_where
from ..layers.swap import layers_for, swap, why_not_fit
from ..recipes.cast import Cast
from ..recipes.recipe import AUTO, RECIPES, Recipe, recipe_unless_auto

__all__ = ["ao_config", "convert", "revert"]

# torchao's Float8LinearConfig and CastConfig, which may not be installed.
Config = Any
CastConfig = Any

_GRANULARITIES = {"tensor": "TENSORWISE", "row": "AXISWISE"}


def ao_config(recipe: str | Recipe, *, emulate: bool = False) -> Config:
    """torchao's Float8LinearConfig for one of our recipes with scaling "tensor" or "row". Scales
    are powers of two under rule "up", else exact.

    Args:
        recipe: a name or a `Recipe`.
        emulate: whether to compute from dequantized operands, on any device.

    Raises:
        ValueError: if torchao has no such configuration.
        ImportError: without torchao.
    """
    chosen = recipe_unless_auto(recipe) or RECIPES["tensor"]
    lib = need("torchao")
    rules = {cast.rule for cast in chosen.casts if cast is not None}
    config = importlib.import_module("torchao.float8.config")
    unknown = ValueError(
        f"torchao has no configuration for recipe {chosen.name!r}; it has 'tensor', "
        "'tensor_gw_hp', 'row' and 'row_gw_hp'"
    )
    if rules not in ({"up"}, {"exact"}):
        raise unknown

    def in_product(cast: Cast | None, other: Cast | None) -> CastConfig:
        """torchao's cast of an operand in a product. other: its cast in the other product."""
        example = cast or other
        if example is None or example.format not in ("e4m3", "e5m2"):
            raise unknown
        dtype = example.number_format.dtype
        if cast is None:
            disabled = config.ScalingType.DISABLED
            return config.CastConfig(scaling_type=disabled, target_dtype=dtype)
        plain = Cast(format=cast.format, scaling=cast.scaling, rule=cast.rule)
        if cast != plain or cast.scaling not in _GRANULARITIES:
            raise unknown
        granularity = config.ScalingGranularity[_GRANULARITIES[cast.scaling]]
        return config.CastConfig(scaling_granularity=granularity, target_dtype=dtype)

    x, w, g, again_w, again_g, again_x = chosen.casts
    return lib.Float8LinearConfig(
        cast_config_input=in_product(x, again_x),
        cast_config_input_for_grad_weight=in_product(again_x, x),
        cast_config_weight=in_product(w, again_w),
        cast_config_weight_for_grad_input=in_product(again_w, w),
        cast_config_grad_output=in_product(g, again_g),
        cast_config_grad_output_for_grad_weight=in_product(again_g, g),
        round_scales_to_power_of_2="up" in rules,
        pad_inner_dim=True,  # scaled_mm takes multiples of 16
        emulate=emulate,
    )


def convert(
    model: nn.Module,
    recipe: str | Recipe | Config = AUTO,
    *,
    where: Where | None = None,
    emulate: bool | None = None,
) -> nn.Module:
    """Replaces nn.Linear with torchao's layers; `fp8.convert` with backend="torchao".

    Hooks, the training flag, names and attributes stay, and `fp8.report` lists every layer. Layers
    with sizes that are not multiples of 16 are left alone unless emulated.

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
    config: Config = recipe
    where = checked_where(where)
    if isinstance(recipe, str | Recipe):
        if emulate is None:
            device = next((p.device for p in model.parameters()), torch.device("cpu"))
            emulate = bool(why_not_device(device))
        config = ao_config(recipe, emulate=emulate)
    elif config.enable_fsdp_float8_all_gather:
        raise ValueError(
            "enable_fsdp_float8_all_gather must be False: it replaces parameters, which neither "
            "ties nor optimizers follow; fp8.training.fsdp.gather_in_fp8 gathers weights in FP8"
        )
    multiple = ALIGNMENT
    how = "torchao, Float8Linear"
    if config.emulate:
        multiple = 1
        how = f"{how}, emulated"

    def make(module: nn.Module) -> nn.Module | str:
        layer = need("torchao").convert_to_float8_training
        return why_not_fit(module, multiple) or layer(module, config=config)

    other = "torchao replaces linear layers"
    layers = layers_for(model, (nn.Linear,), where, make, other)
    return swap(model, layers, adapter="torchao", how=how)


# The name by which `fp8.layers` asks every adapter for the library's recipe.
its_recipe = ao_config


def revert(model: nn.Module) -> nn.Module:
    """Replaces torchao's layers, whatever created them, with nn.Linear with the same parameters.
    Returns ``model``, changed in place, or its replacement. Raises ImportError without torchao."""
    need("torchao")

    def make(name: str, module: nn.Module) -> nn.Module | None:
        # By the module of its class, as torchao has several layers.
        theirs = bare_class(module).__module__.startswith("torchao.")
        if not theirs or not isinstance(module, nn.Linear):
            return None
        if "weight" not in dict(module.named_parameters(recurse=False)):
            return None
        sizes = module.in_features, module.out_features
        return nn.Linear(*sizes, bias=module.bias is not None, device="meta")

    return swap(model, make)
