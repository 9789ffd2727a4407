"""The rows of `verify`, the RMS of a tensor of a call and the range that it should be in, and what
they say in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ...checks.first_call import LOW_GRADIENT

RANGES: dict[str, tuple[float, float] | None] = {
    "activation": (1 / 4, 4.0),
    "output": None,
    "weight": (1 / 4, 4.0),
    "gradient": (1 / 4, 4.0),
    "query-key gradient": (1 / 64, 4.0),
    "weight gradient": (1 / 4, 4.0),
    "passed gradient": None,
    "attention": None,
}
"""Kind of tensor -> the range that its RMS should be in.

A factor of 4 is two steps of the exponent and costs little of a format's range. All-zero tensors
are neither inside nor outside a range and do not count.

"activation" is an operand of a product, which is cast. "output" is the output of a product: it is
judged where another product reads it. "gradient" is the gradient of the output of a product, which
is cast. "passed gradient" is the gradient that a product propagates to its input; it has no range,
because it is only cast once it is the gradient of another output. "weight gradient" is the gradient
that the optimizer receives.

"query-key gradient" is the gradient of the outputs of products that compute only queries, keys or
an additive bias of the logits. For queries and keys of RMS 1 and logits q.k/d with head width d, it
is about 1/sqrt(d): the gradient of a logit is the gradient of its probability times the
probability, about 1/n for n keys, and a query sums n of these times k/d. 1/64 is a quarter of that
for d = 256.

"attention" is a value inside decomposed attention: logits, probabilities and the gradient of
probabilities, whose scale the softmax determines. It has no range. The gradient of the logits is a
"gradient": two products of the backward pass read it. So is the "gradient of scores" of
`scaled_dot_product_attention` where torch computes it by separate products, as with dropout on a
CPU; fused kernels do not expose it.
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


# The diagnosis

_INIT = (
    "bring a plain model to RMS 1 by unit_scale; weights of uu layers were overwritten after the "
    "layers had drawn them: leave them out of the init, or call reset_parameters() after it"
)
_LOSS = (
    "a loss outside of the model divides by the size of the batch: use that of "
    "unit_scaling.functional (U.cross_entropy), or compute it in the model's forward"
)
_HIDDEN = "see what unit_scaling.report says of it, and whether a function of torch stands for U's"


def diagnosis(rows: Sequence[Measurement], loss: float | None) -> list[str]:
    """Returns sentences, causes before their effects, or one saying that all tensors are in range.

    loss: the RMS of the gradient at the model's output; None if the loss is inside the model or the
    model scales that gradient to RMS 1, as `unit_scale` does.
    """
    found = [*_weights(rows), *_values(rows), *_loss(loss)]
    if loss is None or loss >= LOW_GRADIENT:  # otherwise all gradients are that small
        found += _gradients(rows)
    return found or ["every tensor is in the range of its kind"]


def _weights(rows: Sequence[Measurement]) -> Iterator[str]:
    weights = [row for row in rows if row.kind == "weight"]
    outside = [row for row in weights if row.inside is False]
    if outside:
        low, high = min(row.rms for row in outside), max(row.rms for row in outside)
        rms = f"{low:.2g}" if high < 1.1 * low else f"{low:.2g} to {high:.2g}"
        yield (
            f"{len(outside)} of {len(weights)} weights have RMS {rms} instead of 1, the first in "
            f"{_place(outside[0])}: {_INIT}"
        )


def _values(rows: Sequence[Measurement]) -> Iterator[str]:
    values = [row for row in rows if row.kind == "activation"]
    first = next((row for row in values if row.inside is False), None)
    if first is not None:
        verb = "shrink" if first.rms < 1 else "grow"
        yield (
            f"activations {verb} from the {first.tensor} of {_place(first)} on, RMS "
            f"{first.rms:.2g}: {_HIDDEN}"
        )


def _loss(loss: float | None) -> Iterator[str]:
    if loss is not None and 0 < loss < LOW_GRADIENT:
        yield f"the loss's gradient at the model's output has RMS {loss:.2g} instead of 1: {_LOSS}"


def _gradients(rows: Sequence[Measurement]) -> Iterator[str]:
    """The first gradient out of range in backward order is that of the last call. Weight gradients
    do not propagate and come after all others.
    """
    gradients = [row for row in rows if row.kind == "gradient"]
    if gradients and not any(row.rms for row in gradients):
        yield "every gradient is zero: weights of zeros, or a loss that no product goes into"
    outside = [r for r in reversed(rows) if r.inside is False and r.kind.endswith("gradient")]
    outside.sort(key=lambda row: row.kind == "weight gradient")
    if outside:
        first = outside[0]
        verb = "shrink" if first.rms < 1 else "grow"
        yield (
            f"gradients {verb} from the {first.tensor} of {_place(first)} on, backward, RMS "
            f"{first.rms:.2g}: {_HIDDEN}"
        )


def _place(row: Measurement) -> str:
    return f"{row.path or 'the model'} ({row.call})"
