"""`verify`: measures whether a model is unit-scaled, in one training step. Its transforms stay
active: the measured values are those the model computes, and passes to products."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import debug_unwrap
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils.weak import WeakTensorKeyDictionary

from fp8.common.copies import deep_copy
from fp8.common.mixin import check_module
from fp8.common.report import Rows, as_table
from fp8.common.step import Batch, Loss, call, copied, seeded, starts, tensors, unwrapped
from fp8.common.validation import check_name, check_whole
from fp8.formats.format import get_format
from fp8.modes.autocast import outside_compiler
from fp8.modes.dispatch import LEFT
from fp8.modes.dispatch import PRODUCTS as FP8_PRODUCTS
from fp8.recipes.scaling import static_rms

from ..checks.first_call import LOW_GRADIENT, skip_checks
from ..parameter import tags_of
from .install import Args, Kwargs, install, is_sharded
from .record.calls import Slot, tensors_in
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
from .record.probe import Observer, Observing, unseen
from .record.values import is_strided, rms_of
from .values.pending import is_pending, is_unit_scaled

RANGES: dict[str, tuple[float, float]] = {
    "activation": (1 / 4, 4.0),
    "weight": (1 / 4, 4.0),
    "gradient": (1 / 4, 64.0),
    "query-key gradient": (1 / 64, 64.0),
}
"""Kind of tensor -> the range that its RMS should be in.

A factor of 4 is two steps of the exponent and costs little of a format's range. "activation" is an
operand of a product, "gradient" the gradient of its output, to which a static scale gives RMS 16 in
e5m2.

"query-key gradient" is the gradient of the outputs of products that compute only queries or keys.
For queries and keys of RMS 1 and logits q.k/d with head width d, it is about 1/sqrt(d): the
gradient of a logit is the gradient of its probability times the probability, about 1/n for n keys,
and a query sums n of these times k/d. 1/64 is a quarter of that for d = 256.
"""


@dataclass(frozen=True)
class Measurement:
    """One tensor of one call.

    Attributes:
        path: the path of the module.
        call: the kind of product.
        number: the number of earlier calls of this kind in the module.
        tensor: "input", "weight", "other", "query", ..., or "gradient of output".
        kind: a key of RANGES.
        rms: the RMS of the tensor.
        inside: whether rms is in the range of its kind; None if it is 0.
    """

    path: str
    call: str
    number: int
    tensor: str
    kind: str
    rms: float
    inside: bool | None = field(init=False)

    def __post_init__(self) -> None:
        low, high = RANGES[self.kind]
        object.__setattr__(self, "inside", None if self.rms == 0 else low <= self.rms <= high)


class Verification(Rows[Measurement]):
    """The measurements of `verify`; prints as a table.

    Attributes:
        notes: what could not be measured, and why.
        diagnosis: an interpretation of the rows, root causes first.
    """

    def __init__(
        self, rows: Iterable[Measurement], notes: Iterable[str] = (), loss: float | None = None
    ) -> None:
        """loss: as in `_diagnosis`."""
        super().__init__(rows, notes)
        self.diagnosis = _diagnosis(self, loss)

    @property
    def outside(self) -> list[Measurement]:
        """The rows whose RMS is outside the range of its kind: too small, too large or NaN."""
        return [row for row in self if row.inside is False]

    def share(self, kind: str) -> float:
        """Returns the fraction of the rows of a kind that are inside its range.

        NaN if every row of that kind is zero or there is none.

        Raises:
            ValueError: the kind is unknown.
        """
        check_name("kind", kind, RANGES)
        inside = [row.inside for row in self if row.kind == kind and row.inside is not None]
        return sum(inside) / len(inside) if inside else math.nan

    def __str__(self) -> str:
        cells = [("module", "call", "tensor", "kind", "rms", "")]
        for row in self:
            call = f"{row.call} {row.number}" if row.number else row.call
            mark = "outside" if row.inside is False else ""
            path = row.path or "(model)"
            cells.append((path, call, row.tensor, row.kind, f"{row.rms:.3g}", mark))
        return "\n".join([as_table(cells), "", *self.notes, *self._summary(), "", *self.diagnosis])

    __repr__ = __str__

    def _summary(self) -> Iterator[str]:
        for kind, (low, high) in RANGES.items():
            rows = [row.inside for row in self if row.kind == kind]
            if rows:
                zeros, inside = rows.count(None), rows.count(True)
                also = f", {zeros} of zeros" if zeros else ""
                yield f"{kind}: {inside} of {len(rows) - zeros} inside [{low:g}, {high:g}]{also}"


def verify(
    model: nn.Module, batch: Batch, *, loss: Loss | None = None, seed: int = 0
) -> Verification:
    """Runs a training step of ``model`` and measures the RMS of what its products cast.

    Each linear map, matrix product, convolution and attention has rows for its operands and for the
    gradient of its output; an embedding has one for its weight. With `unit_scale` they are measured
    as recipe "static" casts them: weights and gradients divided by a power of two. Biases, masks,
    integer and empty tensors, probabilities of attention, products inside a parametrization, and
    gradients that are not computed have no row; `unit_scaling.transforms.track_scales` measures
    every tensor. ``notes`` names what is one call, such as a recurrent layer.

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
    lists = [(n, m) for n, m in trial.named_modules() if isinstance(m, ParametrizationList)]
    computing = {path for name, part in lists for path, _ in part.named_modules(prefix=name)}
    is_scaled = is_unit_scaled(trial)
    watch = Watch({id(p) for p in trial.parameters()}, computing, is_scaled)
    observing = Observing()
    install(trial, observing)
    if is_pending(trial):  # the first call sets its values
        _step(trial, nullcontext(), batch, loss, seed)
    at_output = _step(trial, observing.by(watch), batch, loss, seed)
    loss_rms = None if is_scaled else max(at_output, default=None)
    return Verification(watch.results(), watch.notes, loss_rms)


def _step(
    model: nn.Module,
    observed: AbstractContextManager[None],
    batch: Batch,
    loss: Loss | None,
    seed: int,
) -> list[float]:
    """A training step whose forward pass alone is observed. Returns the RMS of each gradient at the
    output that is not zero; none for a loss inside the model."""
    at_output: list[float] = []
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.is_cuda})
    with seeded(None, devices), torch.enable_grad():
        with observed:
            output = outside_compiler(lambda: call(model, copied(batch)))
        results = [t for t in tensors(output) if t.requires_grad]
        for tensor in results if all(t.dim() for t in results) else ():
            tensor.register_hook(lambda g: at_output.append(rms_of(g)) if g.any() else None)
        ends, gradients = starts(output, loss, seed)
        if not ends:
            raise ValueError("no tensor in the model's output requires a gradient")
        outside_compiler(lambda: torch.autograd.backward(ends, gradients))
    model.zero_grad()
    return at_output


# The diagnosis

_INIT = (
    "bring a plain model to RMS 1 by unit_scale; weights of uu layers were overwritten after the "
    "layers had drawn them: leave them out of the init, or call reset_parameters() after it"
)
_LOSS = (
    "a loss outside of the model divides by the size of the batch: use that of "
    "unit_scaling.functional (U.cross_entropy), or compute it in the model's forward"
)
_HIDDEN = (
    "unit_scaling.transforms.track_scales shows the calls around it, and unit_scaling.report what "
    "unit_scale did with them; a function of torch may stand for U's"
)
_FEW = ", or only some positions have a gradient, as of a class token or of a mean"


def _diagnosis(rows: Sequence[Measurement], loss: float | None) -> list[str]:
    """Sentences, causes before their effects. loss: the RMS of the gradient at the model's output;
    None if the loss is inside the model, or that gradient is cast at RMS 1, as by `unit_scale`."""
    outside = [row for row in rows if row.inside is False]
    lines = _weights([row for row in rows if row.kind == "weight"])
    lines += _change("activations", [row for row in outside if row.kind == "activation"])
    if loss is not None and 0 < loss < LOW_GRADIENT:  # all gradients are that small
        size = f"has RMS {loss:.2g} instead of 1"
        return [*lines, f"the loss's gradient at the model's output {size}: {_LOSS}"]
    gradients = [row.rms for row in rows if row.kind == "gradient"]
    if gradients and not any(gradients):
        lines.append("every gradient is zero: zero weights, or a loss that no product goes into")
    backward = [row for row in reversed(outside) if row.kind.endswith("gradient")]
    lines += [f"{line}{_FEW}" for line in _change("gradients", backward, "backward, ")]
    return lines or ["every tensor is in the range of its kind"]


def _weights(weights: list[Measurement]) -> list[str]:
    outside = [row for row in weights if row.inside is False]
    if not outside:
        return []
    low, high = min(row.rms for row in outside), max(row.rms for row in outside)
    rms = f"{low:.2g}" if high < 1.1 * low else f"{low:.2g} to {high:.2g}"
    return [
        f"{len(outside)} of {len(weights)} weights have RMS {rms} instead of 1, the first in "
        f"{_place(outside[0])}: {_INIT}"
    ]


def _change(what: str, outside: list[Measurement], direction: str = "") -> list[str]:
    return [
        f"{what} {'shrink' if row.rms < 1 else 'grow'} from the {row.tensor} of {_place(row)} on, "
        f"{direction}RMS {row.rms:.2g}: {_HIDDEN}"
        for row in outside[:1]
    ]


def _place(row: Measurement) -> str:
    return f"{row.path or 'the model'} ({row.call})"


# The observer

_UNMEASURED = frozenset(["out", "per_sample_weights"])
"""Arguments that are neither added nor operands."""

#: Functions of `unit_scaling` that return their input.
_SAME = {"scale_bwd", "residual_split"}


@dataclass(frozen=True)
class _Origin:
    """The origin of a tensor. sources: the nearest products above it. parameter: whether it is a
    parameter, or a view or copy of one. probabilities: whether it is the softmax of scores.
    exponent: that of the static scale of a weight of `unit_scale`."""

    sources: frozenset[_Product] = frozenset()
    parameter: bool = False
    probabilities: bool = False
    exponent: int | None = None


@dataclass
class _Operand:
    label: str
    rms: float
    origin: _Origin


@dataclass(eq=False)
class _Product:
    """A call. scores: whether its output feeds the softmax of an attention. gradient: the RMS of
    that of its output. is_scaled: whether its gradient is cast at a scale."""

    path: str
    call: str
    operands: dict[Slot, _Operand] = field(default_factory=dict)
    scores: bool = False
    gradient: float | None = None
    is_scaled: bool = False

    @property
    def mixes(self) -> bool:
        """Whether it multiplies activations with activations, as in queries times keys."""
        weights = (operand.label == "weight" for operand in self.operands.values())
        return self.call not in ATTENTION and not any(weights)

    def note(self, grad: Tensor | None) -> None:
        self.gradient = None if grad is None else _rms(grad)

    def gradient_as_cast(self) -> float | None:
        if not self.is_scaled or not self.gradient or not math.isfinite(self.gradient):
            return self.gradient
        # A static scale is the power of two next to the first gradient.
        scale = 2.0 ** round(math.log2(self.gradient)) / static_rms(get_format("e5m2"))
        return self.gradient / scale


class Watch(Observer):
    """Measures one call of a model. parameters: ids. computing: the paths of modules that compute a
    weight, whose products are skipped. scales: whether gradients are cast at scales, as in a model
    of `unit_scale`. notes: what could not be measured."""

    def __init__(
        self, parameters: Collection[int], computing: Collection[str], scales: bool
    ) -> None:
        super().__init__()
        self._scales = scales
        self.notes: list[str] = []
        self._parameters = parameters
        self._computing = computing
        self._products: list[_Product] = []
        self._origins = WeakTensorKeyDictionary()

    def observe(self, function: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        kind = kind_of(function)
        multiplies = function in FP8_PRODUCTS or kind in PRODUCTS | RECURRENT | EMBEDDINGS
        multiplies = multiplies and self.path.items[-1] not in self._computing
        tensors = [t for _, t in tensors_in((args, kwargs))]
        place = f"{kind} in {self.path.items[-1] or 'the model itself'}"
        if kind in RECURRENT or (kind == "einsum" and len(tensors) > 2):
            self.notes.append(f"{place}: its steps are one call, not measured inside")
        elif not multiplies and (why := LEFT.get(function)) is not None:
            self.notes.append(f"{place} is not measured: {why}")
        origins = [self._origin(t) for t in tensors]
        origin = self._joined(kind, origins)
        # Products of constants (the angles of rotary embeddings, for example) are not measured.
        if multiplies and any(
            o.parameter or o.sources or debug_unwrap(t).requires_grad
            for o, t in zip(origins, tensors, strict=True)
        ):
            if any(debug_unwrap(t) is not t for t in tensors):
                self.notes.append(
                    f"{place} runs under a transform of torch.func: measured over all that it "
                    "maps, without the gradients that the transform computes"
                )
            output = self._product(function, kind, args, kwargs)
            origin = _Origin(frozenset(self._products[-1:]))
        else:
            output = function(*args, **kwargs)
        for _, tensor in tensors_in(output):
            self._origins[debug_unwrap(tensor)] = origin
        return output

    def _origin(self, tensor: Tensor) -> _Origin:
        tensor = debug_unwrap(tensor)
        if id(tensor) in self._parameters:
            tags = tags_of(tensor)
            is_set = tags.mup_divisor or tags.mup_scale != 1.0
            return _Origin(parameter=True, exponent=_exponent(tags.mup_scale) if is_set else None)
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
        return _Origin(sources, first.parameter, first.probabilities, first.exponent)

    def _product(self, function: Callable[..., Any], kind: str, args: Args, kwargs: Kwargs) -> Any:
        product = _Product(self.path.items[-1], kind)
        with unseen():
            for slot, tensor in (*tensors_in(args), *tensors_in(kwargs)):
                self._add_operand(product, slot, tensor)
        output = function(*args, **kwargs)
        for operand in product.operands.values():
            if operand.origin.exponent is not None:
                operand.rms *= 2.0**-operand.origin.exponent
        product.is_scaled = self._scales
        self._products.append(product)
        with unseen():
            return self._hooked(product, output, (args, kwargs))

    def _hooked(self, product: _Product, output: Any, arguments: Any) -> Any:
        """The result of a product, or a copy of it that measures its gradient: of a view (a linear
        map of three dimensions), gradients pass by once its base is written in place."""
        if isinstance(output, Tensor) and output.requires_grad:
            passed = any(output is t for _, t in tensors_in(arguments))
            output = output if passed else output.clone()
        first = next((t for _, t in tensors_in(output)), None)  # recurrent ones return states
        if first is not None and _is_measurable(first) and product.call not in EMBEDDINGS:
            first = debug_unwrap(first)
            if first.requires_grad:
                first.register_hook(product.note)
        return output

    def _add_operand(self, product: _Product, slot: Slot, tensor: Tensor) -> None:
        if slot[0] in _UNMEASURED or is_added(product.call, slot) or not _is_measurable(tensor):
            return
        origin = self._origin(tensor)
        state = product.call in RECURRENT and slot not in ((0,), ("input",))
        if state and not (origin.parameter and tensor.dim() > 1):
            return
        if product.call in ATTENTION:
            label = slot[0] if isinstance(slot[0], str) else ("query", "key", "value")[slot[0]]
        elif origin.parameter or (product.call in EMBEDDINGS | LAYERS and slot[0] in (1, "weight")):
            label = "weight"
        else:
            known = {operand.label for operand in product.operands.values()}
            label = "other" if "input" in known else "input"
        product.operands[slot] = _Operand(label, _rms(debug_unwrap(tensor)), origin)

    # Results

    def results(self) -> Iterator[Measurement]:
        """Every measurement, in order. The probabilities of attention are none."""
        small = self._small()
        counts: Counter[tuple[str, str]] = Counter()
        for product in self._products:
            place = (product.path, product.call, counts[product.path, product.call])
            counts[product.path, product.call] += 1
            for operand in product.operands.values():
                if not operand.origin.probabilities:
                    kind = "weight" if operand.label == "weight" else "activation"
                    yield Measurement(*place, operand.label, kind, operand.rms)
            gradient = product.gradient_as_cast()
            if gradient is not None:
                kind = "query-key gradient" if product in small else "gradient"
                yield Measurement(*place, "gradient of output", kind, gradient)

    def _small(self) -> set[_Product]:
        """The products that compute only queries and keys."""
        small: set[_Product] = set()
        other: set[_Product] = set()
        for product in reversed(self._products):
            if product in other:
                small.discard(product)
            for operand in product.operands.values():
                logits = product.scores or operand.label in ("query", "key")
                (small if logits or product in small else other).update(operand.origin.sources)
        return small


def _exponent(size: float) -> int:
    """That of the power of two next to the size of a weight of `unit_scale`, at which it is cast.
    Its gradient has a static scale too."""
    return round(math.log2(size))


def _is_measurable(tensor: Tensor) -> bool:
    known = is_strided(tensor) or tensor.is_sparse
    return known and tensor.is_floating_point() and tensor.numel() > 0


@torch.no_grad()
def _rms(tensor: Tensor) -> float:
    """That of the values, in double precision, in which squares do not overflow. tensor: of no
    torch.func transform."""
    values = tensor.coalesce().values() if tensor.is_sparse else tensor
    norm: float = debug_unwrap(torch.linalg.vector_norm(values, dtype=torch.float64)).item()
    return norm / tensor.numel() ** 0.5
