"""A TransformerEngine for the CPU, until the real one runs in tests. The signatures of its layers
and of its context and the fields of its recipes are those of the published package.

Its linear layers compute in float32, note the recipe in force, and refuse a ragged number of tokens
under one. As in the real one, no layer is one of torch's, no bias is an empty tensor, norms are on
"cuda" by default, and each state_dict has an `_extra_state` that cannot be loaded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.fp8.adapters.te_signatures import kept

STATE: dict[str, Any] = {}
"""recipe: in force. entered: arguments of the contexts entered. ran: recipe of each product."""


def bound(name: str) -> Callable[..., dict[str, Any]]:
    """A function with the signature of that name, which returns its arguments."""
    space: dict[str, Any] = {}
    exec(f"def call({kept()['calls'][name]}):\n    return locals()", space)
    return space["call"]


class Format(enum.Enum):
    E4M3 = "e4m3"
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
    """A dataclass with the package's fields and defaults."""
    space = {"os": os, "Format": Format, "MMParams": MMParams}
    made = [(f, Any, dataclasses.field(default=eval(d, space))) for f, d in fields.items()]
    return dataclasses.make_dataclass(name, made)


@contextlib.contextmanager
def entered(given: dict[str, Any]) -> Iterator[None]:
    before = STATE["recipe"]
    STATE["recipe"] = given["recipe"] if given["enabled"] else None
    STATE["entered"].append(given)
    try:
        yield
    finally:
        STATE["recipe"] = before


def autocast(*args: Any, **kwargs: Any) -> Any:
    return entered(bound("autocast.__init__")(None, *args, **kwargs))


class Layer(nn.Module):
    def get_extra_state(self) -> Tensor:
        return torch.ones(1, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        raise RuntimeError("set NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE=1 to load this")


class Linear(Layer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        given = bound("Linear.__init__")(self, *args, **kwargs)
        assert not given["sequence_parallel"], "the third argument is not bias"
        options = {"device": given["device"], "dtype": given["params_dtype"]}
        shape = given["out_features"], given["in_features"]
        self.weight = nn.Parameter(torch.empty(shape, **options))
        bias = torch.zeros(shape[0] * given["bias"], **options)
        self.bias = nn.Parameter(bias) if given["bias"] else bias

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        inp = bound("Linear.forward")(self, *args, **kwargs)["inp"]
        if STATE["recipe"] is not None and inp.shape[:-1].numel() % 8:
            raise ValueError(f"FP8 execution requires ... got tensor with dims={inp.shape}")
        STATE["ran"].append(STATE["recipe"])
        return F.linear(inp, self.weight, self.bias if len(self.bias) else None)


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


class LayerNorm(Norm):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.bias = nn.Parameter(torch.zeros_like(self.weight))

    def forward(self, input: Tensor) -> Tensor:
        return F.layer_norm(input, self.weight.shape, self.weight, self.bias, self.eps)


class RMSNorm(Norm):
    def forward(self, input: Tensor) -> Tensor:
        return F.rms_norm(input, self.weight.shape, self.weight, self.eps)


def install(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Puts the stand-in in the place of the library. Returns ``transformer_engine.pytorch``."""
    recipe = types.ModuleType("transformer_engine.common.recipe")
    for cls in (Format, MMParams, QParams):
        setattr(recipe, cls.__name__, cls)
    for name, fields in kept()["recipes"].items():
        setattr(recipe, name, recipe_class(name, fields))
    te = types.ModuleType("transformer_engine.pytorch")
    for thing in (Linear, LayerNorm, RMSNorm, autocast):
        setattr(te, thing.__name__, thing)
    packages = map(types.ModuleType, ("transformer_engine", "transformer_engine.common"))
    for module in (*packages, te, recipe):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for key, value in {"recipe": None, "entered": [], "ran": []}.items():
        monkeypatch.setitem(STATE, key, value)
    return te
