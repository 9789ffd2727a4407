"""A row of `verify`: the RMS of a tensor of a call, and the range that it should be in."""

from __future__ import annotations

from dataclasses import dataclass, field

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
