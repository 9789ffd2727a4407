"""`verify`: measures whether the casts of a model keep its values, in one training step. Its
transforms stay active: the measured values are those the model computes, and passes to products."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import debug_unwrap
from torch.utils.weak import WeakTensorKeyDictionary

from fp8.common.copies import deep_copy
from fp8.common.report import Rows, as_table
from fp8.common.step import (
    Batch,
    Loss,
    call,
    copied,
    in_own_thread,
    seeded,
    starts,
    tensors,
    unwrapped,
)
from fp8.common.validation import check_module, check_name, check_whole
from fp8.layers.select import auto_of, candidates
from fp8.modes.dispatch import LEFT
from fp8.modes.dispatch import PRODUCTS as FP8_PRODUCTS
from fp8.products.range_loss import ProductCasts, RangeLoss
from fp8.recipes.recipe import PLAIN, STATIC
from fp8.torch_internals.stance import outside_compiler

from ..checks.first_call import skip_checks
from ..checks.ranges import RANGES, Measurement, diagnosis
from ..common.calls import Args, Function, Kwargs
from .install import is_sharded
from .record.calls import Slot, arguments_in, tensors_in
from .record.kinds import (
    ATTENTION,
    EMBEDDINGS,
    LAYERS,
    PRODUCTS,
    RECURRENT,
    TRANSPARENT,
    is_added,
    kind_of,
)
from .record.probe import Observer, unseen
from .record.values import is_strided, size_of
from .values.pending import is_pending, is_unit_scaled


class Verification(Rows[Measurement]):
    """The measurements of `verify`; prints as a table.

    Attributes:
        notes: tensors that could not be measured, with the reasons.
        diagnosis: an interpretation of the rows, root causes first.
    """

    def __init__(
        self,
        rows: Iterable[Measurement],
        notes: Iterable[str] = (),
        loss: float | None = None,
    ) -> None:
        """loss: as in `unit_scaling.checks.ranges.diagnosis`."""
        super().__init__(rows, notes)
        self.diagnosis = diagnosis(self, loss)

    @property
    def outside(self) -> list[Measurement]:
        """The rows that are outside: too small, too large, too far spread, or not finite."""
        return [row for row in self if row.inside is False]

    def share(self, kind: str) -> float:
        """Returns the fraction of the rows of a kind that are inside.

        NaN if every row of that kind is zero or there is none.

        Raises:
            ValueError: the kind is unknown.
        """
        check_name("kind", kind, RANGES)
        found = [row.inside for row in self if row.kind == kind]
        inside = [each for each in found if each is not None]
        if not inside:
            return math.nan
        return sum(inside) / len(inside)

    def __str__(self) -> str:
        cells = [("module", "call", "tensor", "kind", "scale", "rms", "")]
        for row in self:
            call = f"{row.call} {row.number}" if row.number else row.call
            loses = f", loses {row.loss}" if row.loss else ""
            mark = f"outside{loses}" if row.inside is False else ""
            place = (row.path or "(model)", call, row.tensor, row.kind)
            cells.append((*place, f"{row.scale:.3g}", f"{row.rms:.3g}", mark))
        return "\n".join(
            [as_table(cells), "", *self.notes, *self._summary(), "", *self.diagnosis]
        )

    __repr__ = __str__

    def _summary(self) -> Iterator[str]:
        for kind, (low, high) in RANGES.items():
            rows = [row for row in self if row.kind == kind]
            if not rows:
                continue
            counts = Counter(row.inside for row in rows)
            zeros = counts[None]
            by = f"[{low:g}, {high:g}]"
            if any(row.loss for row in rows):
                by = "at their scales"
            also = f", {zeros} of zeros" if zeros else ""
            yield f"{kind}: {counts[True]} of {len(rows) - zeros} inside {by}{also}"


def verify(
    model: nn.Module, batch: Batch, *, loss: Loss | None = None, seed: int = 0
) -> Verification:
    """Runs a training step of ``model``, and judges what its products cast as they cast it.

    Each linear map, matrix product, convolution and attention has rows for its operands and for the
    gradient of its output; an embedding has one for its weight. Biases, masks, integer and empty
    tensors, probabilities of attention, products inside a parametrization, and gradients that are
    not computed have no row; `unit_scaling.transforms.track_scales` measures every tensor.
    ``notes`` names what is one call, such as a recurrent layer.

    A cast without a scale, as of recipe "unit", which `unit_scaling` modules have, keeps values
    whose RMS is in `RANGES`: so each tensor is judged, unless the model is one of `unit_scale`.
    Such a model is cast with scales: those of the open recipe and of converted layers, or else
    those of `fp8.convert`, static ones in layers, and of recipe "tensor" in products without a
    layer. A static scale that is not set is that of this step. At a scale any RMS is in range, so a
    tensor is judged by what it loses: values that span more than the format holds, that have moved
    away from a static scale, or that are not finite.

    The step runs eagerly on a copy, in the model's mode (training or evaluation): the model, its
    gradients, buffers and the random state do not change. If the model has not run since
    `unit_scale`, the step is its first call. `DistributedDataParallel` is measured on the batch of
    this process alone.

    Args:
        model: the model to measure.
        batch: a tensor, a tuple or list of arguments, or a dict of keyword arguments.
        loss: maps the model's output to a scalar. By default the output's ``loss`` or its first
            tensor without dimensions; if there is none, every output tensor gets a standard normal
            gradient.
        seed: the seed of these gradients.

    Raises:
        TypeError: ``model`` is not an `nn.Module`.
        ValueError: no output requires a gradient, the loss is not a scalar, or FSDP has sharded the
            model.

    >>> import unit_scaling as uu
    >>> model = nn.Linear(512, 512)
    >>> uu.verify(model, torch.randn(512, 512)).share("weight")
    0.0
    >>> uu.verify(uu.Linear(512, 512), torch.randn(512, 512)).share("weight")
    1.0
    """
    check_module("verify", model)
    check_whole("seed", seed, 0)
    if not (loss is None or callable(loss)):
        raise TypeError(f"loss must be a function of the model's output, got {loss!r}")
    model = unwrapped(model)
    if is_sharded(model):
        raise ValueError(
            f"verify cannot copy {type(model).__name__}, which FSDP has sharded: call it before"
        )
    trial = deep_copy(model)
    trial.zero_grad()
    skip_checks(trial)
    is_scaled = is_unit_scaled(trial)
    watch = Watch(trial, is_scaled)
    if is_pending(trial):  # the first call sets its values
        _step(trial, nullcontext(), batch, loss, seed)
    at_output = _step(trial, watch.of(trial), batch, loss, seed)
    loss_rms = None if is_scaled else max(filter(None, at_output), default=None)
    return Verification(watch.results(), watch.notes, loss_rms)


def _step(
    model: nn.Module,
    observed: AbstractContextManager[None],
    batch: Batch,
    loss: Loss | None,
    seed: int,
) -> list[float]:
    """A training step whose forward pass alone is observed. Returns the RMS of each gradient at the
    output; none for a loss inside the model."""
    at_output: list[float] = []
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.is_cuda})
    with seeded(None, devices), torch.enable_grad():
        with observed:
            output = outside_compiler(lambda: call(model, copied(batch)))
        results = [t for t in tensors(output) if t.requires_grad]
        if all(t.dim() for t in results):
            for tensor in results:
                tensor.register_hook(lambda g: at_output.append(size_of(g)))
        ends, gradients = starts(output, loss, seed)
        if not ends:
            raise ValueError("no tensor in the model's output requires a gradient")
        outside_compiler(lambda: torch.autograd.backward(ends, gradients))
    model.zero_grad()
    return at_output


# The observer

_UNMEASURED = frozenset(["out", "per_sample_weights"])
"""Arguments that are neither added nor operands."""

_HEADS: dict[int | str, str] = {0: "query", 1: "key", 2: "value"}
"""The operands of attention by position."""

#: Functions of `unit_scaling` that return their input.
_SAME = {"scale_bwd", "residual_split"}

_MAPPED = (
    "runs under a transform of torch.func: measured over all that it maps, without the gradients "
    "that the transform computes"
)

Found = tuple[float, RangeLoss | None]
"""The RMS of a tensor, and what its cast loses."""


@dataclass(frozen=True)
class _Origin:
    """The origin of a tensor. sources: the nearest products above it. parameter: whether it is a
    parameter, or a view or copy of one. probabilities: whether it is the softmax of scores."""

    sources: frozenset[_Product] = frozenset()
    parameter: bool = False
    probabilities: bool = False


@dataclass
class _Operand:
    label: str
    found: Found
    origin: _Origin


@dataclass(eq=False)
class _Product:
    """A call. casts: at scales; None if it has none. scores: whether its output feeds the softmax
    of an attention. gradient: that of its output."""

    path: str
    call: str
    casts: ProductCasts | None
    operands: list[_Operand] = field(default_factory=list)
    scores: bool = False
    gradient: Found | None = None

    @property
    def mixes(self) -> bool:
        """Whether it multiplies activations with activations, as in queries times keys."""
        weights = (operand.label == "weight" for operand in self.operands)
        return self.call not in ATTENTION and not any(weights)

    def add(self, slot: Slot, tensor: Tensor, origin: _Origin) -> None:
        """Measures an argument, if it is an operand."""
        is_read = slot[0] not in _UNMEASURED and not is_added(self.call, slot)
        if not (is_read and _is_measurable(tensor)):
            return
        state = self.call in RECURRENT and slot not in ((0,), ("input",))
        if state and not (origin.parameter and tensor.dim() > 1):
            return
        known = {operand.label for operand in self.operands}
        is_second = self.call in EMBEDDINGS | LAYERS and slot[0] in (1, "weight")
        label = "other" if "input" in known else "input"
        if self.call in ATTENTION:
            label = str(_HEADS.get(slot[0], slot[0]))
        elif origin.parameter or is_second:
            label = "weight"
        judge = None
        if self.casts is not None:
            index = len(self.operands)
            is_weight = label == "weight"
            judge = partial(self.casts.operand, index=index, is_weight=is_weight)
        self.operands.append(_Operand(label, _measured(tensor, judge), origin))

    def note(self, grad: Tensor | None) -> None:
        """Measures the gradient of the output; None where nothing reads that."""
        if grad is not None:
            judge = None if self.casts is None else self.casts.gradient
            self.gradient = _measured(grad, judge)


class Watch(Observer):
    """Measures one call of a model. scales: whether it is cast at scales, as one of `unit_scale`.
    notes: what could not be measured."""

    def __init__(self, model: nn.Module, scales: bool) -> None:
        super().__init__()
        self.notes: list[str] = []
        self._scales = scales
        layers = candidates(model)
        self._recipes = {path: auto_of(layer) for path, layer in layers.items()}
        self._parameters = {id(p) for p in model.parameters()}
        self._products: list[_Product] = []
        self._origins = WeakTensorKeyDictionary()

    def observe(self, function: Function, args: Args, kwargs: Kwargs) -> object:
        kind = kind_of(function)
        arguments = arguments_in(args, kwargs)
        tensors = list(map(debug_unwrap, arguments.values()))
        origins = [self._origin(t) for t in tensors]
        is_product = (
            function in FP8_PRODUCTS or kind in PRODUCTS | RECURRENT | EMBEDDINGS
        )
        multiplies = is_product and "parametrizations" not in self.path.split(".")
        self._note(function, kind, len(tensors), multiplies)
        # Products of constants (the angles of rotary embeddings, for example) are not measured.
        known = any(origin.parameter or origin.sources for origin in origins)
        output: object
        if multiplies and (known or any(t.requires_grad for t in tensors)):
            if any(debug_unwrap(t) is not t for t in arguments.values()):
                self.notes.append(f"{self._place(kind)} {_MAPPED}")
            with unseen():
                product = _Product(self.path, kind, self._casts(kind, tensors))
                for slot, origin in zip(arguments, origins, strict=True):
                    product.add(slot, arguments[slot], origin)
            output = function(*args, **kwargs)
            self._products.append(product)
            origin = _Origin(frozenset([product]))
            with unseen():
                output = self._hooked(product, output, tensors)
        else:
            output = function(*args, **kwargs)
            origin = self._joined(kind, origins)
        for _, tensor in tensors_in(output):
            self._origins[debug_unwrap(tensor)] = origin
        return output

    def _casts(self, kind: str, tensors: list[Tensor]) -> ProductCasts | None:
        # A lookup is not cast: its table is judged as the weight of a layer.
        otherwise = STATIC if kind in EMBEDDINGS else PLAIN
        recipe = self._recipes.get(self.path, otherwise)
        return ProductCasts(recipe, kind, *tensors) if self._scales else None

    def _place(self, kind: str) -> str:
        return f"{kind} in {self.path or 'the model itself'}"

    def _note(
        self, function: Function, kind: str, count: int, multiplies: bool
    ) -> None:
        """Notes a call that is one of several products, or one that no recipe casts."""
        if kind in RECURRENT or (kind == "einsum" and count > 2):
            self.notes.append(
                f"{self._place(kind)}: its steps are one call, not measured inside"
            )
        elif not multiplies and function in LEFT:
            self.notes.append(f"{self._place(kind)} is not measured: {LEFT[function]}")

    def _origin(self, tensor: Tensor) -> _Origin:
        if id(tensor) in self._parameters:
            return _Origin(parameter=True)
        return self._origins.get(tensor, _Origin())

    def _joined(self, kind: str, origins: list[_Origin]) -> _Origin:
        if kind in TRANSPARENT:  # others give a shape, a dtype or an index
            origins = origins[:1]
        sources = frozenset[_Product]().union(*(o.sources for o in origins))
        if kind == "softmax":
            scores = [product for product in sources if product.mixes]
            for product in scores:
                product.scores = True
            return _Origin(probabilities=bool(scores))
        first = origins[0] if origins and kind in TRANSPARENT | _SAME else _Origin()
        return replace(first, sources=sources)

    def _hooked(
        self, product: _Product, output: object, tensors: list[Tensor]
    ) -> object:
        """The result of a product, or a copy of it that measures its gradient: of a view (a linear
        map of three dimensions), gradients pass by once its base is written in place."""
        if isinstance(output, Tensor) and output.requires_grad:
            passed = any(debug_unwrap(output) is t for t in tensors)
            if not passed:
                output = output.clone()
        # Recurrent ones return states too. Hooks of a wrapper of torch.func are not called.
        for first in [debug_unwrap(t) for _, t in tensors_in(output)][:1]:
            is_measured = first.requires_grad and _is_measurable(first)
            if is_measured and product.call not in EMBEDDINGS:
                first.register_hook(product.note)
        return output

    # Results

    def results(self) -> Iterator[Measurement]:
        """Every measurement, in order. The probabilities of attention are none."""
        small = self._small()
        counts: Counter[tuple[str, str]] = Counter()
        for product in self._products:
            place = (product.path, product.call, counts[product.path, product.call])
            counts[product.path, product.call] += 1
            for operand in product.operands:
                if not operand.origin.probabilities:
                    kind = "weight" if operand.label == "weight" else "activation"
                    yield Measurement(*place, operand.label, kind, *operand.found)
            if product.gradient is not None:
                kind = "query-key gradient" if product in small else "gradient"
                yield Measurement(*place, "gradient of output", kind, *product.gradient)

    def _small(self) -> set[_Product]:
        """The products that compute only queries and keys."""
        small: set[_Product] = set()
        other: set[_Product] = set()
        for product in reversed(self._products):
            if product in other:
                small.discard(product)
            for operand in product.operands:
                logits = product.scores or operand.label in ("query", "key")
                sources = operand.origin.sources
                if logits or product in small:
                    small |= sources
                else:
                    other |= sources
        return small


def _is_measurable(tensor: Tensor) -> bool:
    known = is_strided(tensor) or tensor.is_sparse
    return known and tensor.is_floating_point() and tensor.numel() > 0


Judge = Callable[[Tensor], RangeLoss]


def _measured(tensor: Tensor, judge: Judge | None) -> Found:
    """Measures a tensor, outside of modes and of transforms of torch.func."""
    return in_own_thread(_measure, debug_unwrap(tensor), judge)


@torch.no_grad()
def _measure(tensor: Tensor, judge: Judge | None) -> Found:
    values = tensor.coalesce().values() if tensor.is_sparse else tensor
    # In double precision, in which squares do not overflow.
    norm = torch.linalg.vector_norm(values, dtype=torch.float64).item()
    loss = None if judge is None else judge(values)
    return norm / tensor.numel() ** 0.5 / (1.0 if loss is None else loss.scale), loss
