"""The measurements of `uu.verify`: which tensors are in range as they are cast, and what those that
are not have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fp8.products.range_loss import RangeLoss

from .first_call import LOW_GRADIENT

__all__ = ["RANGES", "Measurement", "diagnosis"]

RANGES: dict[str, tuple[float, float]] = {
    "activation": (1 / 4, 4.0),
    "weight": (1 / 4, 4.0),
    "gradient": (1 / 4, 64.0),
    "query-key gradient": (1 / 64, 64.0),
}
"""Kind of tensor -> the range that its RMS should be in where it is cast without a scale.

A factor of 4 is two steps of the exponent and costs little of a format's range. "activation" is an
operand of a product, "gradient" the gradient of its output, whose format, e5m2, reaches further.

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
        rms: the RMS of the tensor as it is cast: divided by ``scale``.
        loss: what it loses in its cast at a scale; None for a cast without a scale.
    """

    path: str
    call: str
    number: int
    tensor: str
    kind: str
    rms: float
    loss: RangeLoss | None = None

    @property
    def inside(self) -> bool | None:
        """Without a scale, whether rms is in the range of its kind; with one, whether the loss is
        small. None if rms is 0."""
        if self.rms == 0:
            return None
        low, high = RANGES[self.kind]
        if self.loss is None:
            return low <= self.rms <= high
        return self.loss.is_small

    @property
    def scale(self) -> float:
        """The scale factor of the cast."""
        if self.loss is None:
            return 1.0
        return self.loss.scale


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
    """Sentences, causes before their effects. loss: the RMS of the gradient at the model's output;
    None if the loss is inside the model, or that gradient is cast at a scale, as by `unit_scale`.
    """
    outside = [row for row in rows if row.inside is False]
    outside.sort(key=lambda row: row.kind.endswith("gradient"))  # causes first
    lines = [
        f"the {row.tensor} of {_place(row)} loses {row.loss} in its cast at scale {row.scale:.3g}: "
        f"it is not finite, spans more than its format or has moved from the scale; {_HIDDEN}"
        for row in outside
        if row.loss is not None
    ][:1]
    outside = [row for row in outside if row.loss is None]
    weights = [row for row in outside if row.kind == "weight"]
    if weights:
        sizes = [f"{size:.2g}" for size in sorted(row.rms for row in weights)]
        span = " to ".join(dict.fromkeys([sizes[0], sizes[-1]]))
        every = [row for row in rows if row.kind == "weight"]
        lines.append(
            f"{len(weights)} of {len(every)} weights have RMS {span} instead of 1, the first in "
            f"{_place(weights[0])}: {_INIT}"
        )
    lines += _change(
        "activations", [row for row in outside if row.kind == "activation"]
    )
    if loss is not None and 0 < loss < LOW_GRADIENT:  # all gradients are that small
        size = f"has RMS {loss:.2g} instead of 1"
        return [*lines, f"the loss's gradient at the model's output {size}: {_LOSS}"]
    gradients = [row.rms for row in rows if row.kind == "gradient"]
    if gradients and not any(gradients):
        lines.append(
            "every gradient is zero: zero weights, or a loss that no product goes into"
        )
    backward = [row for row in reversed(outside) if row.kind.endswith("gradient")]
    lines += [f"{line}{_FEW}" for line in _change("gradients", backward, "backward, ")]
    return lines or ["every tensor is in the range of its kind"]


def _change(what: str, outside: list[Measurement], direction: str = "") -> list[str]:
    if not outside:
        return []
    row = outside[0]
    change = "shrink" if row.rms < 1 else "grow"
    where = f"from the {row.tensor} of {_place(row)} on"
    return [f"{what} {change} {where}, {direction}RMS {row.rms:.2g}: {_HIDDEN}"]


def _place(row: Measurement) -> str:
    return f"{row.path or 'the model'} ({row.call})"
