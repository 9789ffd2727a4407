"""Observes the products of a model: their operands, outputs and gradients.

Operands and results are measured as the model passes and receives them; the model's transforms act
in between.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.func import debug_unwrap
from torch.utils.weak import WeakTensorKeyDictionary

from fp8.common.compiler import FIRST_LOOK
from fp8.modes.dispatch import LEFT
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

RANGES: dict[str, tuple[float, float] | None] = {
    "activation": (1 / 4, 4.0),
    "output": None,
    "weight": (1 / 4, 4.0),
    "gradient": (1 / 4, 4.0),
    "query-key gradient": (1 / 64, 4.0),
    "weight gradient": None,
    "passed gradient": None,
    "attention": None,
}
"""Kind of tensor -> the range that its RMS should be in.

A factor of 4 is two steps of the exponent and costs little of a format's range.

"activation" is an operand of a product, "gradient" the gradient of its output: both are cast.
"output" is judged where another product reads it. "passed gradient" is what a product propagates to
its input, which is cast once it is the gradient of another output. "weight gradient" is what the
optimizer receives, in high precision.

"query-key gradient" is the gradient of the outputs of products that compute only queries or keys.
For queries and keys of RMS 1 and logits q.k/d with head width d, it is about 1/sqrt(d): the
gradient of a logit is the gradient of its probability times the probability, about 1/n for n keys,
and a query sums n of these times k/d. 1/64 is a quarter of that for d = 256.

"attention" is a value inside decomposed attention whose scale the softmax determines: logits,
probabilities and the gradient of probabilities.
"""


@dataclass(frozen=True)
class Measurement:
    """One tensor of one call.

    Attributes:
        path: the path of the module.
        call: the kind of product.
        number: the number of earlier calls of this kind in the module.
        tensor: "input", "weight", "output", ..., "gradient of input", ...
        kind: a key of RANGES.
        rms: the RMS of the tensor.
        inside: whether rms is in the range of its kind; None if the kind has no range or rms is 0.
    """

    path: str
    call: str
    number: int
    tensor: str
    kind: str
    rms: float
    inside: bool | None = field(init=False)

    def __post_init__(self) -> None:
        limits, inside = RANGES[self.kind], None
        if limits is not None and self.rms != 0:
            inside = limits[0] <= self.rms <= limits[1]
        object.__setattr__(self, "inside", inside)


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


#: Functions of `unit_scaling` that return their input.
_SAME = {"scale_bwd", "residual_split"}


@dataclass
class _Product:
    """A call. tensors: its operands by slot, and its result. scores: whether its output feeds the
    softmax of an attention."""

    path: str
    call: str
    number: int
    tensors: dict[Slot, _Operand] = field(default_factory=dict)
    scores: bool = False

    @property
    def mixes(self) -> bool:
        """Whether it multiplies activations with activations, as in queries times keys."""
        weights = (t.kind == "weight" for t in self.tensors.values())
        return self.call not in ATTENTION and not any(weights)


class Watch(Observer):
    """Measures one call of a model. parameters: by id. computing: the paths of modules that compute
    a weight, whose products are skipped. notes: what could not be measured."""

    def __init__(self, parameters: Collection[int], computing: Collection[str]) -> None:
        super().__init__()
        self.notes: list[str] = []
        self._parameters = parameters
        self._computing = computing
        self._products: list[_Product] = []
        self._origins = WeakTensorKeyDictionary()
        self._counts: Counter[tuple[str, str]] = Counter()

    def observe(self, function: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        kind = kind_of(function)
        product = function in FP8_PRODUCTS or kind in PRODUCTS | RECURRENT | EMBEDDINGS
        product = product and self.path.items[-1] not in self._computing
        place = self.path.items[-1] or "the model itself"
        tensors = [t for _, t in tensors_in((args, kwargs))]
        if kind in RECURRENT or (kind == "einsum" and len(tensors) > 2):
            self.notes.append(f"{kind} in {place}: its steps are one call, not measured inside")
        elif not product and (why := LEFT.get(function)) is not None:
            self.notes.append(f"{kind} in {place} is not measured: {why}")
        origins = [self._origin(t) for t in tensors]
        origin = self._joined(kind, origins)
        # products of constants (the angles of rotary embeddings, for example) are not measured
        product = product and any(
            o.parameter or o.sources or debug_unwrap(t).requires_grad
            for o, t in zip(origins, tensors, strict=True)
        )
        if product and any(debug_unwrap(t) is not t for t in tensors):
            self.notes.append(
                f"{kind} in {place} runs under a transform of torch.func: measured over all that "
                "it maps, without the gradients that the transform computes"
            )
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
        elif origin.parameter or (product.call in EMBEDDINGS | LAYERS and slot[0] in (1, "weight")):
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
                kind, of_gradient = _kinds(product, t, index in small)
                place = (product.path, product.call, product.number)
                root = t.numel**0.5
                rms = 2.0**-t.exponent * t.norm.item() / root
                yield Measurement(*place, t.label, kind, rms)
                if t.grad is not None:
                    rms = t.grad.item() / root
                    as_cast = rms / t.cast_at(rms)
                    yield Measurement(*place, f"gradient of {t.label}", of_gradient, as_cast)

    def _small(self) -> set[int]:
        """The products that compute only queries and keys."""
        small: set[int] = set()
        other: set[int] = set()
        for index in reversed(range(len(self._products))):
            product = self._products[index]
            if index in other:
                small.discard(index)
            for t in product.tensors.values():
                logits = product.scores or t.label in ("query", "key")
                (small if logits or index in small else other).update(t.origin.sources)
        return small


def _kinds(product: _Product, t: _Operand, small: bool) -> tuple[str, str]:
    """The kinds of a tensor and of its gradient, keys of `RANGES`."""
    if product.scores and t.label == "output":
        return "attention", "gradient"
    if t.origin.probabilities:
        return "attention", "attention"
    if t.label == "weight":
        return t.kind, "weight gradient"
    if t.label != "output" or product.call in EMBEDDINGS:
        return t.kind, "passed gradient"
    return t.kind, "query-key gradient" if small else "gradient"


def _measurable(tensor: Tensor) -> bool:
    known = is_strided(tensor) or tensor.is_sparse
    return known and tensor.is_floating_point() and tensor.numel() > 0


def _norm(tensor: Tensor) -> Tensor:
    """The norm of the values. tensor: of no torch.func transform."""
    return debug_unwrap(norm_of(tensor))
