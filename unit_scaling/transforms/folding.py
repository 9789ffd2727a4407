"""The plain model equivalent to a unit-scaled one: equations for its factors, and their solution.

The log2 of the ratio of a value of the unit-scaled model to that of the plain model is an affine
function of the unknowns: log2 of the factors of the plain model's parameters. A product adds the
ratios of its operands and log2 of its step's factor, the result of a norm does not depend on the
ratio of its input, a sum needs equal ratios of its terms, and a function that is not homogeneous
needs the ratio 1. Each such condition is a `Tie`: an equation for the unknowns.

Equations are eliminated one by one, so that a contradiction has its call. What remains free
(queries may be larger and keys smaller) makes the ratio 1 of the inputs of norms, where eps then
has the same effect, and then of products, as far as possible.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor

from ..rules.table import find_op
from .plan.plan import Step, Tie
from .record.calls import CallNode, Slot
from .record.kinds import ATTENTION, PRODUCTS, RECURRENT, TRANSPARENT, is_added, named
from .record.values import has_scale

Ratio = dict[str, float]
"""Unknown -> coefficient, "" -> the constant: log2 of a ratio."""

SMALL, MASKED = 1e-3, 1e4
"""The largest number treated as an eps, which is added to a value or bounds it, and the smallest
one that masks."""

_MOVED = named(
    "cat stack hstack vstack dstack column_stack block_diag max min index_add scatter scatter_add "
    "scatter_reduce index_copy index_put masked_scatter copy"
)
"""Kinds as in `_EQUAL` whose numeric arguments are not values."""

_EQUAL = _MOVED | named(
    "masked_fill index_fill setitem fill_diagonal add sub rsub where maximum minimum fmax fmin pad "
    "clamp clip clamp_min clamp_max gt lt ge le eq ne"
)
"""Kinds whose arguments and result have equal ratios; a number among them is 0 or a bound."""

ZEROS = "zeros "
"""The name of the unknown that is the ratio of a constant: zeros have any."""

_POWERS = {"square": 2.0, "var": 2.0, "sqrt": 0.5, "rsqrt": -0.5, "reciprocal": -1.0, "inverse": -1}
_NORMS = named("layer_norm rms_norm group_norm batch_norm instance_norm")


def find_ties(
    nodes: Sequence[CallNode],
    steps: Mapping[int, Step | None],
    buffers: Mapping[int, str],
    outputs: Sequence[int],
) -> tuple[Tie, ...]:
    """Returns the equations. steps: by the index of the call. buffers: names, by id, of the running
    statistics of norms. outputs: the nodes of the model's results."""
    ties: list[Tie] = []
    ratios: list[Ratio] = []
    for index, node in enumerate(nodes):
        try:
            ratios.append(_ratio(node, steps.get(index) or Step(), buffers, ratios, ties))
        except Exception as error:  # arguments that no rule covers; fold names them
            ties.append(Tie((), 1.0, node.path, node.name, str(error)))  # without a solution
            ratios.append({})
    result = _Call(CallNode(None, "output"), "", [], ties)
    for index in outputs:
        result.tie(ratios[index], "the results are those of the plain model")
    return tuple(ties)


def _ratio(
    node: CallNode, step: Step, buffers: Mapping[int, str], ratios: Sequence[Ratio], ties: list[Tie]
) -> Ratio:
    if node.function is None:
        return {} if node.value.parameter is None else {node.value.parameter: -1.0}
    if node.kind.removeprefix("new_").removesuffix("_like") in ("zeros", "empty"):
        return {f"{ZEROS}{len(ratios)}": 1.0}
    if step.op == "replace":
        raise ValueError("it is replaced, by a function that the plain model does not call")
    if step.op in RECURRENT:
        raise ValueError("its factors lie between the steps of the recurrence")
    weights = dict(zip([i.slot for i in node.inputs], step.terms, strict=False))
    call = _Call(node, node.kind or node.name.strip("_"), [], ties)
    tensors = node.tensors
    for i in node.inputs:
        tensor = tensors[i.slot]
        if has_scale(tensor):
            statistics = buffers.get(id(tensor)) if node.kind in _NORMS else None
            ratio = ratios[i.node] if statistics is None else {statistics: -1.0}
            ratio = _plus(ratio, _log(weights.get(i.slot, 1.0)))
            call.terms.append(_Term(i.slot, tensor, ratio))
    rule = _RULES.get(call.kind, _fixed) if call.terms else _fixed
    return _plus(rule(call), _log(step.factor))


def _plus(*ratios: Ratio, times: float = 1.0) -> Ratio:
    result: Ratio = {}
    for ratio in ratios:
        for name, value in ratio.items():
            result[name] = result.get(name, 0.0) + times * value
    return {name: value for name, value in result.items() if value or not name}


def _log(factor: float) -> Ratio:
    return {"": math.log2(factor)} if factor != 1 else {}


class _Term(NamedTuple):
    slot: Slot
    tensor: Tensor
    ratio: Ratio


@dataclass
class _Call:
    """A call with its tensors. ties: where its equations go."""

    node: CallNode
    kind: str
    terms: list[_Term]
    ties: list[Tie]

    @property
    def ratios(self) -> list[Ratio]:
        return [term.ratio for term in self.terms]

    def tie(self, ratio: Ratio, why: str, other: Ratio | None = None, soft: str = "") -> None:
        """Adds the equation that two ratios are equal, or that one is 1. soft: as in `Tie`."""
        difference = _plus(ratio, _plus(other or {}, times=-1))
        constant = difference.pop("", 0.0)
        if difference or abs(constant) > 1e-9:
            terms = tuple(difference.items())
            self.ties.append(Tie(terms, constant, self.node.path, self.node.name, why, soft))

    def named(self) -> dict[str, Ratio]:
        op = find_op(self.node.function)
        assert op is not None
        by_id = {id(term.tensor): term.ratio for term in self.terms}
        arguments = op.bind(self.node.args, self.node.kwargs, self.node.function)
        return {name: by_id[id(v)] for name, v in arguments.items() if id(v) in by_id}

    def numbers(self) -> list[float]:
        """The numbers among the arguments that values are added to, compared with or filled
        with."""
        if self.kind in _MOVED:
            return []
        named = (v for name, v in self.node.kwargs.items() if name != "alpha")
        values = [*self.node.args, *named]
        return [float(v) for v in values if isinstance(v, int | float) and not isinstance(v, bool)]


# Rules


def _fixed(call: _Call) -> Ratio:
    if call.node.value.floating:
        for ratio in call.ratios:
            call.tie(ratio, "it is not homogeneous: the ratio of its argument is 1")
    return {}


def _first(call: _Call) -> Ratio:
    return call.terms[0].ratio


def _same(call: _Call) -> Ratio:
    first, *others = sorted(call.ratios, key=len)
    for other in others:
        call.tie(other, "its terms have one ratio", first)
    bounds = call.numbers()
    if any(0 < abs(n) <= SMALL for n in bounds):
        call.tie(first, "its eps", soft="norm")
    if any(SMALL < abs(n) < MASKED for n in bounds):
        call.tie(first, "a number is added or compared: the ratio of the other term is 1")
    return first


def _product(call: _Call) -> Ratio:
    added = [term.ratio for term in call.terms if is_added(call.kind, term.slot)]
    factors = [term.ratio for term in call.terms if not is_added(call.kind, term.slot)]
    result = _plus(*factors)
    call.tie(factors[0], "", soft="input")
    for ratio in added:
        call.tie(ratio, "its bias has the ratio of its output", result)
    return result


def _attention(call: _Call) -> Ratio:
    named = call.named()
    call.tie(_plus(named["query"], named["key"]), "the ratios of its queries and keys cancel")
    call.tie(named["query"], "", soft="input")
    call.tie(named.get("attn_mask", {}), "its mask has the ratio 1")
    return named["value"]


def _normalize(call: _Call) -> Ratio:
    call.tie(_first(call), "its eps", soft="norm")
    return {}


def _norm(call: _Call) -> Ratio:
    named = call.named()
    x = named["input"]
    call.tie(x, "its eps", soft="norm")
    for name, power in (("running_mean", 1.0), ("running_var", 2.0)):
        wanted = _plus(x, times=power)
        call.tie(named.get(name, wanted), f"its {name} has the ratio of its input", wanted)
    weight = named.get("weight", {})
    call.tie(named.get("bias", weight), "its bias has the ratio of its gain", weight)
    return weight


def _div(call: _Call) -> Ratio:
    divisors = ((0,) if call.node.name.startswith("__r") else (1,), ("other",))
    return _plus(*(_plus(t.ratio, times=-1.0 if t.slot in divisors else 1.0) for t in call.terms))


def _pow(call: _Call) -> Ratio:
    numbers = call.numbers()
    base = isinstance(call.node.args[0], Tensor) and not call.node.name.startswith("__r")
    return _plus(_first(call), times=numbers[0]) if numbers and base else _fixed(call)


_FIRST = named(
    "mean avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d "
    "adaptive_avg_pool3d relu leaky_relu abs neg sum std norm vector_norm amax amin cumsum sort "
    "topk gather fold interpolate tril triu diag nan_to_num detach dropout1d dropout2d dropout3d "
    "embedding embedding_bag max_pool1d max_pool2d max_pool3d max_pool1d_with_indices "
    "max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool1d adaptive_max_pool2d "
    "adaptive_max_pool3d broadcast_tensors meshgrid data requires_grad cpu cuda alias"
)

_RULES: dict[str, Callable[[_Call], Ratio]] = {
    kind: rule
    for rule, kinds in (
        (lambda call: _plus(*call.ratios), ["mul"]),
        (_div, ["div"]),
        (_pow, ["pow"]),
        (_normalize, ["normalize"]),
        (lambda call: _plus(_first(call), times=_POWERS[call.kind]), _POWERS),
        (_norm, _NORMS),
        (_product, [*PRODUCTS, *"outer dot vdot inner multi_dot chain_matmul".split()]),
        (_attention, ATTENTION),
        (_same, _EQUAL),
        (_first, [*TRANSPARENT, *_FIRST]),
        (
            lambda _: {},
            "ones ones_like new_ones full full_like new_full new_tensor sign sgn argmax argmin "
            "arange tensor as_tensor rand_like randn_like randint_like".split(),
        ),
    )
    for kind in kinds
}
"""Kind -> its rule; the last of several. That of all other kinds is `_fixed`."""


# The solution

_TOLERANCE = 1e-6
"""Of log2 values; factors are products of float64 numbers."""


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
    known: dict[str, Ratio] = {}
    against = [tie for tie in ties if not tie.soft and not _eliminate(tie, known)]
    if against:
        raise ValueError(_refusal(against))
    for soft in ("norm", "input"):
        for tie in ties:
            if tie.soft == soft:
                _eliminate(tie, known)
    values: Ratio = {"": 1.0}
    for name in reversed(known):  # a row has no unknowns that earlier rows have solved for
        values[name] = _value(known[name], values)
    inputs: dict[str, set[float]] = {}
    for tie in (tie for tie in ties if tie.soft == "input"):
        ratio = 2.0 ** round(_value(_row(tie), values), 9)
        inputs.setdefault(tie.path, set()).add(ratio)
    named = {name: value for name, value in values.items() if name and not name.startswith(ZEROS)}
    return Folded(
        {name: 2.0**value for name, value in named.items() if abs(value) > 1e-12},
        {path: found.pop() for path, found in inputs.items() if len(found) == 1},
    )


def _row(tie: Tie) -> Ratio:
    return {**dict(tie.terms), "": tie.constant}


def _value(row: Ratio, values: Ratio) -> float:
    return sum(share * values.get(name, 0.0) for name, share in row.items())


def _eliminate(tie: Tie, known: dict[str, Ratio]) -> bool:
    """Solves an equation for an unknown; False if it contradicts earlier ones."""
    row = _row(tie)
    while solved := [name for name in row if name in known]:
        for name in solved:
            share = row.pop(name)
            for other, value in known[name].items():
                row[other] = row.get(other, 0.0) + share * value
        row = {name: value for name, value in row.items() if not name or abs(value) > 1e-9}
    unknowns = [name for name in row if name]
    if not unknowns:
        return abs(row.get("", 0.0)) < _TOLERANCE
    share = row.pop(unknowns[-1])
    known[unknowns[-1]] = {other: -value / share for other, value in row.items()}
    return True


def _refusal(against: list[Tie]) -> str:
    named = (f"{tie.call} in {tie.path or 'the model itself'} ({tie.why})" for tie in against)
    calls = list(dict.fromkeys(named))
    some = "; ".join(calls[:5])
    more = f"; and {len(calls) - 5} more" if len(calls) > 5 else ""
    return (
        "the weights of the plain model cannot hold the factors of unit_scale at: "
        f"{some}{more}. Keep the unit-scaled model, or use init='preserve', which has no factors"
    )
