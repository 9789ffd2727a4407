"""A TransformerEngine for the CPU: signatures, fields and defaults are generated from the published
package (`te_signatures`), what they compute is written here, with our products for its FP8 ones.

As the real one: no ``isinstance`` of torch's layers, "cuda" where no device is named, an empty
tensor for no bias, `_extra_state` in every state_dict that is refused when loaded, sizes checked in
the forward pass, unknown fields of recipes ignored.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import os
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fp8 import Cast, Recipe
from fp8.products.matmul import linear
from tests.fp8.adapters.te_signatures import kept


def bound(name: str) -> Callable[..., dict[str, Any]]:
    """A function with the signature of that name, which returns its arguments."""
    space: dict[str, Any] = {}
    exec(f"def call({kept()['calls'][name]}):\n    return locals()", space)
    return space["call"]


def signed(name: str) -> Callable[[Any], Any]:
    """Gives a function that signature, and its arguments, in one dict, bound by it."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        bind = bound(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            given = bind(*args, **kwargs)
            return function(*args[:1], given) if "self" in given else function(given)

        call.__signature__ = inspect.signature(bind)
        return call

    return decorate


class Format(enum.Enum):
    E4M3 = "e4m3"
    E5M2 = "e5m2"
    HYBRID = "hybrid"
    E2M1 = "e2m1"


@dataclasses.dataclass(frozen=True)
class MMParams:
    use_split_accumulator: bool = True


@dataclasses.dataclass(frozen=True)
class QParams:
    power_2_scale: bool = False
    amax_epsilon: float = 0.0


def recipe_class(name: str, fields: dict[str, str]) -> type:
    """A dataclass with the package's fields and defaults, which ignores unknown keywords."""
    space = {"os": os, "Format": Format, "MMParams": MMParams}
    made = [(f, Any, dataclasses.field(default=eval(d, space))) for f, d in fields.items()]
    cls = dataclasses.make_dataclass(name, made)
    strict = cls.__init__

    def __init__(self: Any, **given: Any) -> None:
        strict(self, **{key: value for key, value in given.items() if key in fields})
        assert self.fp8_format is not Format.E5M2, "Pure E5M2 training is not supported."

    cls.__init__ = __init__
    cls.__module__ = "transformer_engine.common.recipe"
    return cls


STATE: dict[str, Any] = {"recipe": None, "entered": []}


class autocast:
    @signed("autocast.__init__")
    def __init__(self, given: dict[str, Any]) -> None:
        self.given = given

    def __enter__(self) -> autocast:
        self.before = STATE["recipe"]
        STATE["recipe"] = self.given["recipe"] if self.given["enabled"] else None
        STATE["entered"].append(self.given)
        return self

    def __exit__(self, *exception: object) -> None:
        STATE["recipe"] = self.before


@signed("fp8_autocast")
def fp8_autocast(given: dict[str, Any]) -> autocast:
    return autocast(enabled=given["enabled"], recipe=given["fp8_recipe"])


def ours(recipe: Any) -> Recipe:
    """The products that a recipe stands for."""
    grad = "e4m3" if recipe.fp8_format is Format.E4M3 else "e5m2"
    if getattr(recipe, "scaling_factor_compute_algo", None):
        options = {"scaling": "unit"}
    elif type(recipe).__name__ == "Float8CurrentScaling":
        assert recipe.use_power_2_scales is recipe.fp8_quant_fwd_inp.power_2_scale
        options = {"scaling": "tensor", "rule": "up" if recipe.use_power_2_scales else "exact"}
    else:
        options = {"scaling": "tensor", "rule": "exact"}
    cast = Cast(format="e4m3", **options)
    return Recipe(name="its", input=cast, weight=cast, grad=Cast(format=grad, **options))


class Layer(nn.Module):
    def get_extra_state(self) -> Tensor:
        state = pickle.dumps({"amax_history": [1.0]})
        return torch.frombuffer(bytearray(state), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        if state.numel():
            raise RuntimeError("set NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE=1 to load this")


class Linear(Layer):
    @signed("Linear.__init__")
    def __init__(self, given: dict[str, Any]) -> None:
        nn.Module.__init__(self)
        assert not given["sequence_parallel"], "the third argument is not bias"
        options = {"device": given["device"], "dtype": given["params_dtype"]}
        self.in_features, self.out_features = given["in_features"], given["out_features"]
        self.use_bias = given["bias"]
        self.weight = nn.Parameter(torch.empty(self.out_features, self.in_features, **options))
        if self.use_bias:
            self.bias = nn.Parameter(torch.zeros(self.out_features, **options))
        else:
            self.bias = torch.empty(0, **options)

    @signed("Linear.forward")
    def forward(self, given: dict[str, Any]) -> Tensor:
        inp = given["inp"]
        bias = self.bias if self.use_bias else None
        if STATE["recipe"] is None:
            return F.linear(inp, self.weight, bias)
        for tensor in (inp, self.weight):
            rows = tensor.shape[:-1].numel()
            if rows % 8 or tensor.shape[-1] % 16:
                raise ValueError(f"FP8 execution requires ... got tensor with dims={tensor.shape}")
        return linear(inp, self.weight, bias, recipe=ours(STATE["recipe"]))


class Norm(Layer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        name = type(self).__name__
        given = bound(f"{name}.__init__")(self, *args, **kwargs)
        inner = {"eps": given["eps"], "zero_centered_gamma": given["zero_centered_gamma"]}
        super().__init__()
        given = bound(f"ops.{name}.__init__")(
            self, given["normalized_shape"], **inner, **given["kwargs"]
        )
        self.eps, self.zero_centered_gamma = given["eps"], given["zero_centered_gamma"]
        options = {"device": given["device"] or "cuda", "dtype": given["dtype"]}
        self.weight = nn.Parameter(torch.ones(given["normalized_shape"], **options))
        if name == "LayerNorm":
            self.bias = nn.Parameter(torch.zeros(given["normalized_shape"], **options))


class LayerNorm(Norm):
    def forward(self, input: Tensor) -> Tensor:
        return F.layer_norm(input, self.weight.shape, self.weight, self.bias, self.eps)


class RMSNorm(Norm):
    def forward(self, input: Tensor) -> Tensor:
        return F.rms_norm(input, self.weight.shape, self.weight, self.eps)


for _layer in (Linear, LayerNorm, RMSNorm):
    _layer.__module__ = "transformer_engine.pytorch"


def install(monkeypatch: Any) -> types.ModuleType:
    """Puts it where ``import transformer_engine`` looks; returns ``transformer_engine.pytorch``."""
    recipe = types.ModuleType("transformer_engine.common.recipe")
    for cls in (Format, MMParams, QParams):
        setattr(recipe, cls.__name__, cls)
    for name, fields in kept()["recipes"].items():
        setattr(recipe, name, recipe_class(name, fields))
    te = types.ModuleType("transformer_engine.pytorch")
    for thing in (Linear, LayerNorm, RMSNorm, autocast):
        setattr(te, thing.__name__, thing)
    te.fp8_autocast = fp8_autocast
    packages = ("transformer_engine", "transformer_engine.common")
    modules = {name: types.ModuleType(name) for name in packages}
    for name, module in {**modules, te.__name__: te, recipe.__name__: recipe}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(STATE, "recipe", None)
    monkeypatch.setitem(STATE, "entered", [])
    return te
