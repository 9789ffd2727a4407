"""RMS norms in the order of an engine: where a value is rounded, and by what it is multiplied.

A norm of a checkpoint multiplies ``x / rms(x)`` by a weight. Implementations differ in whether the
quotient is rounded to the dtype of the model before that, and in whether the sum of residual stream
and branch is: of bfloat16 values about a quarter differ by a rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from weakref import ref

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from ...common.copies import deep_copy
from ...common.mixin import Args, Forward, Mixin, add_mixin, remove_mixin
from ...common.validation import check_module
from ...torch_internals import Keywords
from .engines import Engine, engine_of

M = TypeVar("M", bound=nn.Module)


def _by_weight(quotient: Tensor, weight: Tensor, offset: float) -> Tensor:
    if offset:
        return quotient * (offset + weight.float())
    return quotient.to(weight.dtype) * weight


def _in_float32(quotient: Tensor, weight: Tensor, offset: float) -> Tensor:
    return quotient * (offset + weight.float())


ORDERS: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "weight": _by_weight,
    "float32": _in_float32,
}
"""`Engine.norms` -> a function (quotient in float32, weight, offset) of the product. "weight": in
the dtype of the weight, as in transformers and in vLLM; norms that multiply by ``1 + weight``
(Gemma) are in float32 there too. "float32": rounded once, as in FlashInfer."""


@dataclass(frozen=True)
class RmsNorm:
    """What a module computes that is an RMS norm: ``x / sqrt(mean(x**2) + eps)`` times its weight
    plus ``offset``, 0 or 1."""

    weight: str
    eps: float
    offset: float


# The size of values beside which eps counts, and of those beside which it does not.
_SMALL, _LARGE = 1e-4, 1e4


@torch.no_grad()
def rms_norm_of(module: nn.Module) -> RmsNorm | None:
    """The norm that a module computes over the last dimension of its one argument; None if it
    computes something else, or with an eps that is no attribute of it.

    The module is called with values whose norm is known, whatever its class is.
    """
    named = dict(module.named_parameters())
    sizes = [p.shape for p in named.values()]
    if len(sizes) != 1 or len(sizes[0]) != 1 or next(module.children(), None):
        return None
    (weight,) = named
    (size,) = sizes[0]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, size, generator=generator)
    w = torch.rand(size, generator=generator) + 0.5
    # A module may refuse the call: it is then no norm of one argument.
    try:
        copy = deep_copy(module).to("cpu", torch.float32)
        large, small = (
            functional_call(copy, {weight: w}, (scale * x,))
            for scale in (_LARGE, _SMALL)
        )
        factor = large / (x * x.square().mean(-1, keepdim=True).rsqrt())
    except Exception:  # as for a norm with a gate
        return None
    if factor.shape != x.shape:
        return None
    # What large values are multiplied by is the weight, or in Gemma's norms 1 + weight.
    for offset in (0.0, 1.0):
        if torch.allclose(factor, (w + offset).expand_as(x), rtol=1e-4):
            # Small values are divided by the root of mean + eps, which gives eps with the errors of
            # float32. The attribute next to it is exact.
            mean = (_SMALL * x).square().mean(-1)
            inverse = (small / (_SMALL * x * (w + offset))).square().mean(-1)
            found = float((inverse.reciprocal() - mean).mean())
            known = [v for v in vars(module).values() if isinstance(v, float)]
            for eps in known:
                if math.isclose(eps, found, rel_tol=1e-2):
                    return RmsNorm(weight, eps, offset)
    return None


class _Sums(TorchFunctionMode):
    """Remembers, in float32, the sums of two tensors of 16 bits, which norms of some engines read
    before they are rounded."""

    def __init__(self) -> None:
        super().__init__()
        # By id, as tensors compare element by element.
        self._exact: dict[int, tuple[ref[Tensor], Tensor]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        exact = None
        if func in _ADDITIONS and len(args) == 2 and not kwargs:
            both = all(isinstance(x, Tensor) and x.itemsize == 2 for x in args)
            if both and args[0].shape == args[1].shape:
                exact = args[0].float() + args[1].float()
        result = func(*args, **(kwargs or {}))
        # The tensor itself is the key: the norm gets the result of the addition, not a copy.
        if exact is not None:
            key = id(result)
            dropped = partial(self._drop, key)
            self._exact[key] = ref(result, dropped), exact
        return result

    def _drop(self, key: int, _: object) -> None:
        self._exact.pop(key, None)

    def before_rounding(self, x: Tensor) -> Tensor:
        """The sum that ``x`` was rounded from, or x itself in float32 if it is none."""
        if id(x) in self._exact:
            return self._exact[id(x)][1]
        return x.float()


_ADDITIONS = (torch.add, Tensor.add, Tensor.__add__, Tensor.__iadd__, Tensor.add_)

_RUNNING: ContextVar[_Sums | None] = ContextVar("sums of a running model", default=None)


class _OfEngine(Mixin):
    """A norm in the order of an engine."""

    _attributes = ("_norm_of_engine",)
    _norm_of_engine: tuple[RmsNorm, Engine]

    def around(self, forward: Forward, args: Args, kwargs: Keywords) -> Tensor:
        norm, engine = self._norm_of_engine
        (x,) = (*args, *kwargs.values())
        wide = _before_rounding(x) if engine.residual == "float32" else x.float()
        inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps)
        weight = getattr(self, norm.weight)
        product = ORDERS[engine.norms](wide * inverse, weight, norm.offset)
        return product.to(x.dtype)


def _before_rounding(x: Tensor) -> Tensor:
    running = _RUNNING.get()
    if running is None:
        raise RuntimeError(
            "a norm that reads the residual stream before it is rounded ran outside of its model, "
            "as activation checkpointing does: take an engine with residual='rounded'"
        )
    return running.before_rounding(x)


class _WithSums(Mixin):
    """A model whose norms read sums before they are rounded."""

    def around(self, forward: Forward, args: Args, kwargs: Keywords) -> Any:
        with _Sums() as mode:
            token = _RUNNING.set(mode)
            try:
                return forward(*args, **kwargs)
            finally:
                _RUNNING.reset(token)


def norms_in(model: nn.Module) -> tuple[list[str], list[str]]:
    """The names of the norms that `norms_of_engine` has changed, and of other modules whose
    parameters are all vectors, such as norms that it does not know."""
    changed, others = [], []
    for name, module in model.named_modules():
        if isinstance(module, _OfEngine):
            changed.append(name)
        elif next(module.children(), None) is None:
            sizes = {p.dim() for p in module.parameters()}
            if sizes == {1}:
                others.append(name)
    return changed, others


def norms_of_engine(model: M, engine: str | Engine | None) -> M:
    """Gives the RMS norms of ``model`` the order of an engine, in place, for a trainer that shall
    compute what the engine computes. Gradients are those of the new order.

    Args:
        model: its norms are found by what they compute, whatever their class is
            (`rms_norm_of`); others stay as they are. An engine whose norms read the unrounded sum
            of residual stream and branch needs eager mode, without activation checkpointing.
        engine: a name in `ENGINES`, or an `Engine`; None undoes it.

    Returns:
        ``model``.

    Raises:
        TypeError: if ``model`` is not a module.
        ValueError: for an unknown engine.
    """
    check_module("norms_of_engine", model)
    if engine is not None:
        engine = engine_of(engine)
    remove_mixin(model, _WithSums)
    found = False
    # A list, as a change of the class of a module changes what `modules` yields.
    for module in [*model.modules()]:
        remove_mixin(module, _OfEngine)
        vars(module).pop("_norm_of_engine", None)
        norm = rms_norm_of(module) if engine is not None else None
        if engine is not None and norm is not None:
            found = True
            vars(module)["_norm_of_engine"] = norm, engine
            add_mixin(module, _OfEngine)
    # The sums are made outside of the norms, in the forward pass of the model.
    if found and engine is not None and engine.residual == "float32":
        add_mixin(model, _WithSums)
    return model
