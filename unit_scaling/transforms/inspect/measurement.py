"""The rows of `verify`, the RMS of a tensor of a call and the range that it should be in, and what
they say in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ...checks.first_call import LOW_GRADIENT

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

A factor of 4 is two steps of the exponent and costs little of a format's range. All-zero tensors
are neither inside nor outside a range and do not count.

"activation" is an operand of a product, "gradient" the gradient of its output: both are cast. Where
`unit_scale` has planned the product, they are measured as cast: divided by the powers of two of the
plan. "output" is its output, which is judged where another product reads it. "passed gradient" is
what it propagates to its input, which is cast once it is the gradient of another output. "weight
gradient" is what the optimizer receives, in high precision.

"query-key gradient" is the gradient of the outputs of products that compute only queries, keys or
an additive bias of the logits. For queries and keys of RMS 1 and logits q.k/d with head width d, it
is about 1/sqrt(d): the gradient of a logit is the gradient of its probability times the
probability, about 1/n for n keys, and a query sums n of these times k/d. 1/64 is a quarter of that
for d = 256.

"attention" is a value inside decomposed attention: logits, probabilities and the gradient of
probabilities, whose scale the softmax determines. It has no range. The gradient of the logits is a
"gradient": two products of the backward pass read it.
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
_HIDDEN = (
    "unit_scaling.transforms.track_scales shows the calls around it, and unit_scaling.report what "
    "unit_scale did with them; a function of torch may stand for U's"
)
_FEW = ", or only some positions have a gradient, as of a class token or of a mean"


def diagnosis(rows: Sequence[Measurement], loss: float | None) -> list[str]:
    """Sentences, causes before their effects, or one saying that all tensors are in range. loss:
    the RMS of the gradient at the model's output; None if the loss is inside the model or the model
    scales that gradient to RMS 1, as `unit_scale` does."""
    outside = [row for row in rows if row.inside is False]
    found = _weights([row for row in rows if row.kind == "weight"])
    found += _change("activations", [row for row in outside if row.kind == "activation"])
    if loss is not None and 0 < loss < LOW_GRADIENT:
        size = f"has RMS {loss:.2g} instead of 1"
        found.append(f"the loss's gradient at the model's output {size}: {_LOSS}")
    if loss is None or loss >= LOW_GRADIENT:  # otherwise all gradients are that small
        gradients = [row.rms for row in rows if row.kind == "gradient"]
        if gradients and not any(gradients):
            found.append(
                "every gradient is zero: weights of zeros, or a loss that no product goes into"
            )
        # In backward order. Weight gradients do not propagate and come after all others.
        backward = [row for row in reversed(outside) if row.kind.endswith("gradient")]
        backward.sort(key=lambda row: row.kind == "weight gradient")
        found += [f"{line}{_FEW}" for line in _change("gradients", backward, "backward, ")]
    return found or ["every tensor is in the range of its kind"]


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
