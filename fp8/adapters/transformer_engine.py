"""TransformerEngine: its Linear, LayerNorm and RMSNorm in a model, under its recipes, and back.

Nothing here has run on a GPU yet. Tested without one, with the Python code of the published
package: its recipes, inserting its layers into models and removing them, its contexts and scale
updates; and training, with layers generated from its signatures.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from ..common.libraries import need
from ..common.mixin import Gained, bare_class, gain, lose
from ..recipes.recipe import AUTO, Recipe
from ..selection.where import Where, checked_function
from ..surgery.swap import forget, layers_for, shared, swap, why_not_fit
from .padding import Padded
from .te_recipe import delayed_scaling, te_recipe

__all__ = ["autocast", "convert", "delayed_scaling", "revert", "te_recipe", "weights"]

_TYPES = (nn.Linear, nn.LayerNorm, nn.RMSNorm)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MULTIPLES = {"MXFP8BlockScaling": 32, "Float8BlockScaling": 128}
"""Recipe -> the sizes of a weight and the number of tokens must be multiples of this; others: 16.
The products of the backward pass sum over each of the three, so each is the last dimension of an
operand (utils.assert_dim_for_fp8_exec and the quantizers' is_quantizable, 2.20)."""
_EXTRA_STATE = "_extra_state"
_EPS = "fp8_eps"


def autocast(recipe: Any, enabled: bool = True) -> AbstractContextManager[Any]:
    """TransformerEngine's context in which its layers compute in FP8.

    It calls TransformerEngine's ``autocast``, or ``fp8_autocast`` in versions before 2.8, with the
    argument names of that version. Amax is reduced over all ranks.

    Args:
        recipe: a name, a `Recipe`, or a recipe of TransformerEngine's.
        enabled: whether the layers compute in FP8.

    Returns:
        The context manager.

    Raises:
        ImportError: without TransformerEngine.
        ValueError: as `te_recipe`.
    """
    te = need("transformer_engine")
    context = getattr(te, "autocast", None) or te.fp8_autocast
    name = "recipe" if "recipe" in inspect.signature(context).parameters else "fp8_recipe"
    return context(enabled=enabled, **{name: its_recipe(recipe)})


def its_recipe(recipe: Any) -> Any:
    """TransformerEngine's recipe for a name or a `Recipe`; a recipe of TransformerEngine's
    unchanged."""
    return te_recipe(recipe) if isinstance(recipe, str | Recipe) else recipe


class _Autocast(Gained):
    """A model that runs under TransformerEngine's autocast: in training, and optionally in
    evaluation."""

    fp8_te_recipe: Any
    fp8_in_eval: bool

    def around(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        recipe = vars(self).get("fp8_te_recipe")
        if recipe is None:  # reverted, but called through a wrapper of its old forward
            return forward(*args, **kwargs)
        training = self.training  # type: ignore[attr-defined]
        with autocast(recipe, enabled=training or self.fp8_in_eval):
            return forward(*args, **kwargs)


class _Layer(Gained):
    """A layer of TransformerEngine with only its weights in checkpoints."""

    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state


class _Linear(Padded, _Layer):
    """A linear layer for any number of tokens."""


def convert(
    model: nn.Module,
    recipe: Any = AUTO,
    *,
    where: Where | None = None,
    in_eval: bool = False,
) -> nn.Module:
    """Replaces nn.Linear, nn.LayerNorm and nn.RMSNorm with TransformerEngine's layers, under its
    autocast; `fp8.convert` with backend="transformer_engine".

    Parameters remain the same objects, so ties, frozen weights, dtype, device and optimizers stay
    valid. So do hooks, the training flag and the keys of the state_dict. `_extra_state` is not
    among these: the history of "delayed" restarts after a checkpoint is loaded. `fp8.report` lists
    every layer. Left alone are subclasses, unsupported sizes, norms that TransformerEngine does not
    have (without weight, LayerNorm without bias), the layers inside nn.MultiheadAttention and,
    under "delayed", layers with two names, because its histories support one call per pass.

    Args:
        model: changed in place.
        recipe: a name, a `Recipe`, or a recipe of TransformerEngine's; see `te_recipe`. "auto" is
            "tensor", because the converted layers are torch's, which are not unit-scaled.
        where: (name, layer) -> whether to convert it; None converts every layer.
        in_eval: whether to use FP8 in evaluation too.

    Returns:
        ``model``; if it is itself a layer, the layer that replaces it. Calls of the returned model
        run in FP8, direct calls of its submodules do not.

    Raises:
        ImportError: without TransformerEngine.
        ValueError: as `te_recipe`.
    """
    te, chosen, where = need("transformer_engine"), its_recipe(recipe), checked_function(where)
    kind = type(chosen).__name__
    multiple = _MULTIPLES.get(kind, 16)
    once = shared(model) if kind == "DelayedScaling" and chosen.reduce_amax else set()

    def make(module: nn.Module) -> nn.Module | str:
        if id(module) in once:
            return "has two names, and DelayedScaling takes one call a pass"
        return _why_not(module, multiple) or _te_layer(te, module, multiple)

    how = f"TransformerEngine, {kind}"
    layers = layers_for(model, _TYPES, where, make, "TransformerEngine has no such layer")
    model = swap(model, layers, adapter="transformer_engine", how=how)
    gain(model, _Autocast)
    model.fp8_te_recipe = chosen
    model.fp8_in_eval = in_eval  # type: ignore[assignment]
    return model


def _why_not(module: nn.Module, multiple: int) -> str:
    """Why TransformerEngine has no layer like one of torch; "" if it has one."""
    if isinstance(module, nn.LayerNorm | nn.RMSNorm) and not module.elementwise_affine:
        return f"te.{type(module).__name__} has no form without weight"
    if isinstance(module, nn.LayerNorm) and module.bias is None:
        return "te.LayerNorm has no form without bias"
    why, dtype = why_not_fit(module, multiple), module.weight.dtype
    return why or ("" if dtype in _DTYPES else f"TransformerEngine has no {dtype}")


def _te_layer(te: Any, module: nn.Module, multiple: int) -> nn.Module:
    """The replacement layer, on the meta device; it gets the parameters of ``module`` later."""
    weight: Tensor = module.weight  # type: ignore[assignment]
    if isinstance(module, nn.Linear):
        bias = module.bias is not None
        sizes = (module.in_features, module.out_features)
        layer = te.Linear(*sizes, bias=bias, params_dtype=weight.dtype, device="meta")
        if not bias:  # an empty tensor that is not a parameter
            layer.bias = weight.detach().new_empty(0)
        gain(layer, _Linear)
        layer.fp8_multiple = multiple
        return layer
    eps = torch.finfo(weight.dtype).eps if module.eps is None else module.eps
    norm = getattr(te, type(module).__name__)
    shape = tuple(weight.shape)
    layer = norm(shape, eps=eps, device="meta", dtype=weight.dtype)
    vars(layer)[_EPS] = module.eps
    gain(layer, _Layer)
    return layer


def revert(model: nn.Module) -> nn.Module:
    """Replaces TransformerEngine's layers with torch's layers with the same parameters.

    It also replaces layers that `convert` did not insert, such as Accelerate's. Layers without an
    equivalent in torch (LayerNormLinear, split parameters, zero-centered norms) stay.

    Args:
        model: changed in place.

    Returns:
        ``model``; if it is itself such a layer, the layer that replaces it.

    Raises:
        ImportError: without TransformerEngine.
    """
    te = need("transformer_engine")
    for module in model.modules():
        if isinstance(module, _Autocast):
            lose(module, _Autocast)
            del module.fp8_te_recipe, module.fp8_in_eval
    model = swap(model, lambda name, module: _torch_layer(te, module))
    forget(model)
    return model


def _torch_layer(te: Any, module: nn.Module) -> nn.Module | None:
    kind = bare_class(module)
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    if weight is None or getattr(module, "zero_centered_gamma", False):
        return None
    given: dict[str, Any] = {"device": "meta", "dtype": weight.dtype}
    if kind is te.Linear:
        bias = any(name == "bias" for name, _ in module.named_parameters(recurse=False))
        return nn.Linear(weight.shape[1], weight.shape[0], bias=bias, **given)
    norm = {te.LayerNorm: nn.LayerNorm, te.RMSNorm: nn.RMSNorm}.get(kind)
    if norm is None:
        return None
    eps = vars(module).get(_EPS, module.eps)
    return norm(tuple(weight.shape), eps=eps, **given)


def weights(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Removes the `_extra_state` of TransformerEngine's layers from a state_dict.

    Args:
        state_dict: of any model with such layers.

    Returns:
        A state_dict that loads into a model without them, or into one of `convert`.
    """
    return {
        key: value for key, value in state_dict.items() if key.rpartition(".")[2] != _EXTRA_STATE
    }
