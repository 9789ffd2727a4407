"""Converts our recipes to TransformerEngine's. Every field is set explicitly, because defaults
differ between versions and devices and may come from the environment."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..common.libraries import need
from ..recipes.cast import Cast
from ..recipes.recipe import RECIPES, Recipe, given_recipe

_NEUTRAL = {
    "fp8_dpa": False,
    "fp8_mha": False,
    "backward_override": None,
    "enable_2d_quantization": False,
    "row_scaled_activation": False,
    "nvfp4_4over6": "none",
    "nvfp4_4over6_e4m3_use_256": "all",
    "nvfp4_4over6_err_mode": "MAE",
}
"""Fields that only some recipes or versions have, with values that disable them."""

_FORMATS = {("e4m3", "e4m3"): "E4M3", ("e4m3", "e5m2"): "HYBRID"}
"""Formats (forward, gradients) -> the name in TransformerEngine."""


def _recipes() -> Any:
    need("transformer_engine")
    return importlib.import_module("transformer_engine.common.recipe")


def _make(kind: str, **given: Any) -> Any:
    """Creates a recipe of that class. Raises for unknown fields, which TransformerEngine would
    ignore."""
    library = _recipes()
    if not hasattr(library, kind):
        raise ValueError(f"this version of TransformerEngine has no recipe {kind}")
    cls = getattr(library, kind)
    known = {field.name for field in dataclasses.fields(cls)}
    unknown = sorted(given.keys() - known)
    if unknown:
        raise ValueError(f"{kind} of this version of TransformerEngine has no {unknown[0]!r}")
    return cls(**given, **{key: value for key, value in _NEUTRAL.items() if key in known})


def format_of(name: str) -> Any:
    """TransformerEngine's Format of that name.

    Args:
        name: "HYBRID" (e4m3 forward, e5m2 for gradients) or "E4M3".

    Returns:
        The Format.

    Raises:
        ValueError: for other names, including "E5M2", with which TransformerEngine does not train.
    """
    if name not in _FORMATS.values():
        raise ValueError(f"fp8_format must be 'HYBRID' or 'E4M3', got {name!r}")
    return getattr(_recipes().Format, name)


def delayed_scaling(
    *,
    margin: int = 0,
    fp8_format: str = "HYBRID",
    amax_history_len: int = 1024,
    amax_compute_algo: str = "max",
    interval: int = 1,
    override_linear_precision: tuple[bool, bool, bool] = (False, False, False),
) -> Any:
    """TransformerEngine's DelayedScaling, with the documented option names.

    Args:
        margin: the scale leaves headroom for that many doublings.
        fp8_format: as in `format_of`.
        amax_history_len: the number of passes considered.
        amax_compute_algo: "max" or "most_recent" of them.
        interval: only 1. Versions before 2.0 could recompute scales every ``interval`` steps;
            current ones recompute them in each step and ignore the option.
        override_linear_precision: the forward product and those of the gradients of input and
            weight in high precision. Only (False, False, False), because the current DelayedScaling
            ignores it; our and torchao's recipe "row_gw_hp" has the last.

    Returns:
        The recipe object.

    Raises:
        ValueError: for other values and unknown names.
    """
    if interval != 1:
        raise ValueError(
            f"interval must be 1, got {interval}: TransformerEngine recomputes scales at each step"
        )
    if any(override_linear_precision):
        raise ValueError(
            "override_linear_precision must be (False, False, False), got "
            f"{tuple(override_linear_precision)}: TransformerEngine's DelayedScaling computes all "
            "three products in FP8"
        )
    if amax_compute_algo not in ("max", "most_recent"):
        raise ValueError(
            f"amax_compute_algo must be 'max' or 'most_recent', got {amax_compute_algo!r}"
        )
    return _make(
        "DelayedScaling",
        margin=margin,
        fp8_format=format_of(fp8_format),
        amax_history_len=amax_history_len,
        amax_compute_algo=amax_compute_algo,
        scaling_factor_compute_algo=None,
        reduce_amax=True,
    )


def scale_of_one(amax: Tensor, scale: Tensor, fp8_max: Any, recipe: Any) -> Tensor:
    """The scale function of DelayedScaling under recipe "unit": always 1."""
    return torch.ones_like(scale)


def _unit(cast: Cast, format: str) -> Any:
    return _make(
        "DelayedScaling",
        margin=0,
        fp8_format=format_of(format),
        amax_history_len=1,
        amax_compute_algo="most_recent",
        scaling_factor_compute_algo=scale_of_one,
        reduce_amax=False,
    )


def _delayed(cast: Cast, format: str) -> Any:
    return delayed_scaling(
        margin=cast.margin,
        fp8_format=format,
        amax_history_len=cast.history or 1,
        amax_compute_algo="most_recent" if cast.history == 1 else "max",
    )


def _with_powers(made: Any, powers: bool) -> Any:
    """Sets whether scales are powers of two in the fields that are read; the class has already
    filled them from its default."""
    for operand in ("fwd_inp", "fwd_weight", "bwd_grad"):
        params = _recipes().QParams(power_2_scale=powers, amax_epsilon=0.0)
        setattr(made, f"fp8_quant_{operand}", params)
    return made


def _mm(split: bool) -> Any:
    return _recipes().MMParams(use_split_accumulator=split)


def _current(cast: Cast, format: str) -> Any:
    powers = cast.rule == "up"
    made = _make(
        "Float8CurrentScaling",
        use_power_2_scales=powers,
        fp8_format=format_of(format),
        fp8_gemm_fprop=_mm(False),
        fp8_gemm_dgrad=_mm(True),
        fp8_gemm_wgrad=_mm(True),
    )
    return _with_powers(made, powers)


def _block(cast: Cast, format: str) -> Any:
    powers = cast.rule == "up"
    made = _make(
        "Float8BlockScaling",
        use_f32_scales=not powers,
        fp8_format=format_of(format),
        x_block_scaling_dim=1,
        w_block_scaling_dim=2,
        grad_block_scaling_dim=1,
        fp8_gemm_fprop=_mm(True),
        fp8_gemm_dgrad=_mm(True),
        fp8_gemm_wgrad=_mm(True),
    )
    return _with_powers(made, powers)


def _mx(cast: Cast, format: str) -> Any:
    return _make("MXFP8BlockScaling", margin=0, fp8_format=format_of(format))


def _nvfp4() -> Any:
    flags = ("disable_rht", "disable_stochastic_rounding", "disable_2d_quantization")
    library = _recipes()
    return _make(
        "NVFP4BlockScaling",
        **dict.fromkeys(flags, False),
        fp4_format=library.Format.E2M1,
        fp8_format=library.Format.E4M3,
    )


_MAKERS: dict[str, tuple[tuple[str | None, ...], Callable[[Cast, str], Any]]] = {
    "unit": ((None,), _unit),
    "delayed": (("up", "exact"), _delayed),
    "tensor": (("up", "exact"), _current),
    "block": (("up", "exact"), _block),
    "mx": (("up",), _mx),
}
"""Scaling -> the rules that TransformerEngine supports, and a function of (cast of the input,
format) that creates its recipe."""


def te_recipe(recipe: str | Recipe) -> Any:
    """TransformerEngine's recipe object for one of ours.

    "delayed" becomes DelayedScaling, "tensor" Float8CurrentScaling, "block" Float8BlockScaling,
    "mxfp8" MXFP8BlockScaling, "nvfp4" NVFP4BlockScaling, and "unit" DelayedScaling with scales of
    1; "auto" is "tensor". DelayedScaling scales by fp8_max / amax, which our default rule rounds to
    a power of two.

    Args:
        recipe: a name or a `Recipe`.

    Returns:
        The recipe object.

    Raises:
        ValueError: if TransformerEngine has no such recipe.
    """
    chosen = given_recipe(recipe) or RECIPES["tensor"]
    if dataclasses.replace(chosen, name="nvfp4") == RECIPES["nvfp4"]:
        return _nvfp4()
    cast, grad = chosen.input, chosen.grad
    if cast is not None and grad is not None and chosen == _plain(chosen.name, cast, grad):
        rules, make = _MAKERS.get(cast.scaling, ((), _unit))
        format = _FORMATS.get((str(cast.format), str(grad.format)))
        if cast.rule in rules and format is not None:
            return make(cast, format)
    names = "'unit', 'unit_e4m3', 'delayed', 'tensor', 'block', 'mxfp8' and 'nvfp4'"
    raise ValueError(f"TransformerEngine has no recipe for {chosen.name!r}; it has {names}")


def _plain(name: str, cast: Cast, grad: Cast) -> Recipe:
    """A recipe with the scaling, rule, history and margin of ``cast`` for every operand, and
    otherwise as in TransformerEngine."""
    delayed = cast.scaling == "delayed"
    margin, history = (cast.margin, cast.history) if delayed else (0, None)
    plain = Cast(
        format=cast.format, scaling=cast.scaling, rule=cast.rule, margin=margin, history=history
    )
    tile = (128, 128) if cast.scaling == "block" else plain.tile
    return Recipe(
        name=name,
        input=plain,
        weight=dataclasses.replace(plain, tile=tile),
        grad=dataclasses.replace(plain, format=grad.format),
    )
