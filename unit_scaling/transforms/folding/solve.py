"""Solves the equations of `folding.ratios` for the factors of the plain model's parameters.

Hard equations are eliminated one by one, so that a contradiction can be attributed to its call. The
remaining freedom (queries may be larger and keys smaller, for example) is resolved by least
squares: inputs of norms have ratios near 1, so that eps has the same effect, then inputs of
products, then the parameters keep their size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from ..plan.plan import Tie
from .ratios import ZEROS

_Row = dict[str, float]
"""Unknown -> coefficient, "" -> the constant."""

_WEIGHTS = {"norm": 1.0, "input": 1e-2}
_SIZE = 1e-5
"""The weights of input ratios, and of the factors of parameters, in least squares."""

_TOLERANCE = 1e-6
"""Of log2 values; factors are products of float64 numbers."""

_NAMED = 5
"""The maximum number of calls that an error names."""


class Folded(NamedTuple):
    """factors: parameter or buffer -> its multiplier in the plain model. inputs: module with a
    product -> the ratio of its input to that in the plain model. exponents: module with a product
    -> the exponent of the power of two that its input is cast at."""

    factors: dict[str, float]
    inputs: dict[str, float]
    exponents: Mapping[str, int] = MappingProxyType({})


def folded(ties: Iterable[Tie]) -> Folded:
    """The solution of the equations. Raises ValueError, naming the calls of a contradiction."""
    ties = list(dict.fromkeys(ties))
    known: dict[str, _Row] = {}
    against = [tie for tie in ties if not tie.soft and not _eliminate(tie, known)]
    if against:
        raise ValueError(_refusal(against))
    for name in reversed(known):  # later rows contain no earlier unknowns
        known[name] = _reduced(known[name], known)
    free = _chosen(ties, known)
    values = {name: _value(row, free) for name, row in known.items()} | free
    left = max((abs(_value(_row(tie), values)) for tie in ties if not tie.soft), default=0.0)
    assert left < 10 * _TOLERANCE, f"the factors leave a residual of {left:.3g}"
    inputs: dict[str, set[float]] = {}
    for tie in (tie for tie in ties if tie.soft == "input"):
        ratio = 2.0 ** round(_value(_row(tie), values), 9)
        inputs.setdefault(tie.path, set()).add(ratio)
    factors = {n: 2.0**value for n, value in values.items() if not n.startswith(ZEROS)}
    return Folded(
        {name: factor for name, factor in factors.items() if abs(factor - 1) > 1e-12},
        {path: found.pop() for path, found in inputs.items() if len(found) == 1},
    )


def _row(tie: Tie) -> _Row:
    return {**dict(tie.terms), "": tie.constant}


def _eliminate(tie: Tie, known: dict[str, _Row]) -> bool:
    """Solves an equation for an unknown; False if it contradicts earlier ones."""
    row = _reduced(_row(tie), known)
    unknowns = [name for name in row if name]
    if not unknowns:
        return abs(row.get("", 0.0)) < _TOLERANCE
    name = unknowns[-1]
    share = row.pop(name)
    known[name] = {other: -value / share for other, value in row.items()}
    return True


def _reduced(row: _Row, known: dict[str, _Row]) -> _Row:
    row = dict(row)
    while found := [name for name in row if name in known]:
        for name in found:
            share = row.pop(name)
            for other, value in known[name].items():
                row[other] = row.get(other, 0.0) + share * value
        row = {name: value for name, value in row.items() if not name or abs(value) > 1e-9}
    return row


def _value(row: _Row, values: dict[str, float]) -> float:
    return sum(share * (values.get(name, 0.0) if name else 1.0) for name, share in row.items())


def _chosen(ties: list[Tie], known: dict[str, _Row]) -> dict[str, float]:
    """The remaining unknowns, by weighted least squares."""
    soft = [(_reduced(_row(tie), known), _WEIGHTS[tie.soft]) for tie in ties if tie.soft]
    soft += [(row, _SIZE) for row in known.values()]
    names = list(dict.fromkeys(name for row, _ in soft for name in row if name))
    soft += [({name: 1.0}, _SIZE) for name in names]
    place = {name: i for i, name in enumerate(names)}
    matrix, right = np.zeros((len(names), len(names))), np.zeros(len(names))
    for row, weight in soft:
        terms = [(place[name], value) for name, value in row.items() if name]
        for i, a in terms:
            right[i] -= weight**2 * a * row.get("", 0.0)
            for j, b in terms:
                matrix[i, j] += weight**2 * a * b
    return dict(zip(names, np.linalg.solve(matrix, right).tolist(), strict=True))


def _refusal(against: list[Tie]) -> str:
    named = (f"{tie.call} in {tie.path or 'the model itself'} ({tie.why})" for tie in against)
    calls = list(dict.fromkeys(named))
    some = "; ".join(calls[:_NAMED])
    more = f"; and {len(calls) - _NAMED} more" if len(calls) > _NAMED else ""
    return (
        "the weights of the plain model cannot hold the factors of unit_scale at: "
        f"{some}{more}. Keep the unit-scaled model, or use init='preserve', which has no factors"
    )
