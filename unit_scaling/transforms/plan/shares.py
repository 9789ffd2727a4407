"""Parameters that join values in a sum, a concatenation or a choice: each term keeps its share.

The positions and the class token of a vision transformer are small beside the patches that they
join. If every parameter had RMS 1 there, they would be as large, and hide the patches. The shares
are measured in a run with the original values of all parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..capture.kinds import EMBEDDINGS, TRANSPARENT
from ..capture.record import CallNode, Key, Slot
from .actions import Scaling

JOINS = frozenset("add sub cat stack where".split())
"""Kinds whose result consists of its tensor arguments, its terms."""

COMPARABLE = 2.0
"""Terms whose RMS differs by at most this factor have the rule of the op: equal shares."""


def joined(
    node: CallNode, nodes: Sequence[CallNode], factors: Mapping[str, float]
) -> dict[Slot, CallNode]:
    """The terms of a call that joins a parameter, or rows of one, with values; none for another.

    factors: the divisors of parameters, by name.
    """
    if node.key is None or node.kind not in JOINS or node.numel == 1 or node.computed:
        return {}
    terms = {i.slot: nodes[i.node] for i in node.inputs if nodes[i.node].live}
    own = [term for term in terms.values() if term.computed]
    looked_up = any(_is_looked_up(term, nodes) for term in terms.values())
    joins = len(terms) > 1 and bool(own or looked_up) and all(t.origin in factors for t in own)
    return terms if joins else {}


def _is_looked_up(node: CallNode, nodes: Sequence[CallNode]) -> bool:
    while node.kind in TRANSPARENT and node.inputs:
        node = nodes[node.inputs[0].node]
    return node.kind in EMBEDDINGS


def find_shares(
    nodes: Sequence[CallNode], factors: Mapping[str, float]
) -> dict[Key, tuple[Scaling, ...]]:
    """Returns, for each such call, the factors of its terms: the RMS of a term over that of the
    result; none if its terms are comparable.

    nodes: of a run with the original values of parameters, whose RMS is noted.
    """
    found: dict[Key, tuple[Scaling, ...]] = {}
    for node in nodes:
        terms = joined(node, nodes, factors)
        sizes = {s: factors[t.origin or ""] if t.computed else t.rms for s, t in terms.items()}
        if node.key is None or not sizes:
            continue
        comparable = max(sizes.values()) <= COMPARABLE * min(sizes.values())
        shares = {} if comparable else {slot: size / node.rms for slot, size in sizes.items()}
        found[node.key] = tuple((slot, share, share) for slot, share in shares.items())
    return found
