"""Observes the products of a model: their operands, outputs and gradients.

Operands and results are measured as the model passes and receives them; the model's transforms act
in between.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import debug_unwrap
from torch.utils.weak import WeakTensorKeyDictionary

from fp8.common.compiler import FIRST_LOOK
from fp8.modes.dispatch import LEFT, OPAQUE
from fp8.modes.dispatch import PRODUCTS as FP8_PRODUCTS

from ..install import Args, Given, Kwargs
from ..record.calls import Slot, mapped, tensors_in
from ..record.kinds import (
    ATTENTION,
    EMBEDDINGS,
    LAYERS,
    PRODUCTS,
    RECURRENT,
    TRANSPARENT,
    is_added,
    kind_of,
)
from ..record.probe import Observer, on_its_own, unseen
from ..record.values import is_strided, norm_of
from ..run.replay import Replay
from .measurement import Measurement

_UNCAST = frozenset(["chain_matmul", "multi_dot"])
"""Products that no recipe applies to; they are measured all the same."""

_WEIGHTED = EMBEDDINGS | LAYERS
"""Products whose second operand is always a weight."""

_UNMEASURED = frozenset(["out", "per_sample_weights"])
"""Arguments that are neither added nor operands."""


@dataclass(frozen=True)
class _Origin:
    """The origin of a tensor. sources: the nearest products above it. parameter: whether it is a
    parameter, or a view or copy of one. probabilities: whether it is the softmax of scores."""

    sources: frozenset[int] = frozenset()
    parameter: bool = False
    probabilities: bool = False


@dataclass
class _Operand:
    """label: its name in the call. exponent: of the power of two that the plan divides it by before
    a cast. casts: whether the plan divides its gradient by a power of two before a cast. scale:
    that power; None or 0 if no gradient has set it."""

    label: str
    kind: str
    norm: Tensor
    numel: int
    origin: _Origin = _Origin()
    exponent: int = 0
    casts: bool = False
    scale: Tensor | None = None
    grad: Tensor | None = None

    def note(self, grad: Tensor | None) -> None:
        self.grad = None if grad is None else _norm(grad)

    def cast_at(self, rms: float) -> float:
        """What its gradient, of RMS ``rms``, is divided by before a cast."""
        if not (self.casts and rms):
            return 1.0
        known = 0.0 if self.scale is None else self.scale.median().item()
        return known or 2.0 ** round(math.log2(rms))


PASSED = "passed gradient"
"""Gradients that are not cast, or are measured as the gradient of the output of another product."""

#: Functions of `unit_scaling` that return their input and scale its gradient.
_SAME = {"scale_bwd", "residual_split"}


@dataclass
class _Product:
    """A call. tensors: its operands by slot, and its result. scores: whether its output feeds the
    softmax of an attention. biases: the products that an additive bias of the logits comes from."""

    path: str
    call: str
    number: int
    tensors: dict[Slot, _Operand] = field(default_factory=dict)
    scores: bool = False
    biases: frozenset[int] = frozenset()

    @property
    def mixes(self) -> bool:
        """Whether it multiplies activations with activations, as in queries times keys."""
        weights = (t.kind == "weight" for t in self.tensors.values())
        return self.call not in ATTENTION and not any(weights)


class Watch(Observer):
    """Measures one call of a model. parameters: names by id. computing: the paths of modules that
    compute a weight, whose products are skipped. notes: what could not be measured."""

    def __init__(self, parameters: dict[int, str], computing: frozenset[str] = frozenset()) -> None:
        super().__init__()
        self.notes: list[str] = []
        self._parameters = parameters
        self._computing = computing
        self._products: list[_Product] = []
        self._origins = WeakTensorKeyDictionary()
        self._counts: Counter[tuple[str, str]] = Counter()

    def observe(self, function: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        kind = kind_of(function)
        product = function in FP8_PRODUCTS or kind in PRODUCTS | RECURRENT | EMBEDDINGS | _UNCAST
        product = product and self.path.items[-1] not in self._computing
        place = self.path.items[-1] or "the model itself"
        tensors = [t for _, t in tensors_in((args, kwargs))]
        if kind in RECURRENT or (kind == "einsum" and len(tensors) > 2):
            self.notes.append(f"{kind} in {place}: its steps are one call, not measured inside")
        elif not product and (why := (OPAQUE | LEFT).get(function)) is not None:
            self.notes.append(f"{kind} in {place} is not measured: {why}")
        origins = [self._origin(t) for t in tensors]
        origin = self._joined(kind, origins)
        # products of constants (the angles of rotary embeddings, for example) are not measured
        product = product and any(
            o.parameter or o.sources or debug_unwrap(t).requires_grad
            for o, t in zip(origins, tensors, strict=True)
        )
        if product and any(debug_unwrap(t) is not t for t in tensors):
            self.notes.append(f"{kind} in {place} {_TRANSFORMED}")
        if product:
            output = self._product(function, kind, args, kwargs)
            origin = _Origin(frozenset([len(self._products) - 1]))
        else:
            output = function(*args, **kwargs)
        for _, tensor in tensors_in(output):
            self._origins[debug_unwrap(tensor)] = origin
        return output

    def _origin(self, tensor: Tensor) -> _Origin:
        tensor = debug_unwrap(tensor)
        if id(tensor) in self._parameters:
            return _Origin(parameter=True)
        return self._origins.get(tensor, _Origin())

    def _joined(self, kind: str, origins: list[_Origin]) -> _Origin:
        if kind in TRANSPARENT:  # others give a shape, a dtype or an index
            origins = origins[:1]
        sources = frozenset[int]().union(*(o.sources for o in origins))
        if kind == "softmax":
            scores = {s for s in sources if self._products[s].mixes}
            for index in scores:
                self._products[index].scores = True
                self._products[index].biases |= sources - scores
            return _Origin(probabilities=bool(scores))
        first = origins[0] if origins and kind in TRANSPARENT | _SAME else _Origin()
        return _Origin(sources, first.parameter, first.probabilities)

    def _product(self, function: Callable[..., Any], kind: str, args: Args, kwargs: Kwargs) -> Any:
        path = self.path.items[-1]
        product = _Product(path, kind, self._counts[path, kind])
        self._counts[path, kind] += 1
        args, kwargs = self._hooked(product, args, kwargs)
        replay = next((mode for mode in FIRST_LOOK.items[::-1] if isinstance(mode, Replay)), None)
        if replay is not None:
            replay.latest = replay.place = None
        output = function(*args, **kwargs)
        step = None if replay is None else replay.latest
        for slot, exponent in () if step is None else step.static:
            if slot in product.tensors:
                product.tensors[slot].exponent = exponent
        with unseen():
            output = on_its_own(output, args, kwargs)
            first = next((t for _, t in tensors_in(output)), None)  # recurrent ones return states
            if first is not None and _measurable(first):
                first = debug_unwrap(first)
                result = _Operand("output", "output", _norm(first), first.numel())
                result.casts = replay is not None
                result.scale = None if replay is None else replay.gradient_scale()
                product.tensors["result",] = result
                if first.requires_grad:
                    first.register_hook(result.note)
        self._products.append(product)
        return output

    def _hooked(self, product: _Product, args: Args, kwargs: Kwargs) -> Given:
        def watched(slot: Slot, tensor: Tensor) -> Tensor:
            if slot[0] in _UNMEASURED or is_added(product.call, slot):
                product.biases |= self._origin(tensor).sources
                return tensor
            state = product.call in RECURRENT and slot not in ((0,), ("input",))
            weight = self._origin(tensor).parameter and tensor.dim() > 1
            if not _measurable(tensor) or (state and not weight):
                return tensor
            operand = product.tensors[slot] = self._operand(product, slot, tensor)
            recorded = debug_unwrap(tensor).requires_grad and torch.is_grad_enabled()
            if recorded and is_strided(tensor):
                # Its gradient is that of this call alone. A view would not support sparse
                # gradients.
                tensor = torch.ops.aten.alias.default(tensor)
                debug_unwrap(tensor).register_hook(operand.note)
            return tensor

        with unseen():
            return mapped(watched, args), mapped(watched, kwargs)

    def _operand(self, product: _Product, slot: Slot, tensor: Tensor) -> _Operand:
        origin = self._origin(tensor)
        if product.call in ATTENTION:
            label = slot[0] if isinstance(slot[0], str) else ("query", "key", "value")[slot[0]]
        elif origin.parameter or (product.call in _WEIGHTED and slot[0] in (1, "weight")):
            label = "weight"
        else:
            known = {t.label for t in product.tensors.values()}
            label = "other" if "input" in known else "input"
        kind = "weight" if label == "weight" else "activation"
        tensor = debug_unwrap(tensor)
        return _Operand(label, kind, _norm(tensor), tensor.numel(), origin)

    # Results

    def results(self) -> Iterator[Measurement]:
        """Every measurement, in order."""
        small = self._small()
        for index, product in enumerate(self._products):
            for t in product.tensors.values():
                name = _named(product, t, index in small)
                place = (product.path, product.call, product.number)
                root = t.numel**0.5
                rms = 2.0**-t.exponent * t.norm.item() / root
                yield Measurement(*place, name.label, name.kind, rms)
                if t.grad is not None:
                    rms = t.grad.item() / root
                    as_cast = rms / t.cast_at(rms)
                    yield Measurement(
                        *place, f"gradient of {name.label}", name.of_gradient, as_cast
                    )

    def _small(self) -> set[int]:
        """The products that compute only queries, keys or biases of logits."""
        small: set[int] = set()
        other: set[int] = set()
        for index in reversed(range(len(self._products))):
            product = self._products[index]
            if index in other:
                small.discard(index)
            small |= product.biases if product.call in ATTENTION or product.scores else set()
            for t in product.tensors.values():
                logits = product.scores or t.label in ("query", "key")
                (small if logits or index in small else other).update(t.origin.sources)
        return small


class _Named(NamedTuple):
    """What a tensor is reported as: its label, its kind, the kind of its gradient."""

    label: str
    kind: str
    of_gradient: str


def _named(product: _Product, t: _Operand, small: bool) -> _Named:
    if product.scores:
        if t.label == "output":
            return _Named("logits", "attention", "gradient")
        return _Named("query" if t.label == "input" else "key", t.kind, PASSED)
    if t.origin.probabilities:
        return _Named("probabilities", "attention", "attention")
    if t.label == "weight":
        return _Named(t.label, t.kind, "weight gradient")
    if t.label != "output" or product.call in EMBEDDINGS:
        averages = any(each.origin.probabilities for each in product.tensors.values())
        label = "value" if averages and t.label in ("input", "other") else t.label
        return _Named(label, t.kind, PASSED)
    return _Named(t.label, t.kind, "query-key gradient" if small else "gradient")


def _measurable(tensor: Tensor) -> bool:
    known = is_strided(tensor) or tensor.is_sparse
    return known and tensor.is_floating_point() and tensor.numel() > 0


def _norm(tensor: Tensor) -> Tensor:
    """The norm of the values. tensor: of no torch.func transform."""
    return debug_unwrap(norm_of(tensor))


_TRANSFORMED = (
    "runs under a transform of torch.func: measured over all that it maps, without the gradients "
    "that the transform computes"
)
