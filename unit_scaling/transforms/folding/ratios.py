"""The ratio of each value of a unit-scaled model to that of the equivalent plain model.

The log2 of a ratio is an affine function of the unknowns: log2 of the factors of the plain model's
parameters. A product adds the ratios of its operands and log2 of its step's factor, the result of a
norm does not depend on the ratio of its input, a sum needs equal ratios of its terms, and a
function that is not homogeneous needs the ratio 1. Each such condition is a `Tie`: an equation for
the unknowns. `transforms.fold` solves them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from ...ops.products import is_bias
from ...rules.table import OPS, find_op
from ..capture.kinds import (
    ATTENTION,
    AVERAGES,
    LOSSES,
    PRODUCTS,
    RECURRENT,
    TRANSPARENT,
    is_added,
)
from ..capture.record import CallNode, Input
from ..capture.values import MASKING, has_scale
from ..plan.actions import Plan, Step, Tie

Ratio = dict[str, float]
"""Unknown -> coefficient, "" -> the constant: log2 of a ratio."""

SMALL = 1e-3
"""The largest number treated as an eps, which is added to a value or bounds it."""

_KEEPS = (TRANSPARENT | AVERAGES) | frozenset(
    (
        "relu leaky_relu rrelu abs neg sum std norm vector_norm amax amin median cumsum cummax "
        "cummin sort msort topk kthvalue gather interpolate fold tril triu diag diag_embed trace "
        "nan_to_num detach dropout1d dropout2d dropout3d feature_alpha_dropout embedding "
        "max_pool1d max_pool2d max_pool3d max_pool1d_with_indices max_pool2d_with_indices "
        "max_pool3d_with_indices lp_pool1d lp_pool2d lp_pool3d adaptive_max_pool1d "
        "adaptive_max_pool2d adaptive_max_pool3d fft fft2 fftn ifft ifft2 ifftn rfft rfft2 rfftn "
        "irfft irfft2 irfftn aminmax embedding_bag broadcast_tensors meshgrid data "
        "requires_grad_ cpu cuda alias"
    ).split()
)
"""Kinds whose result has the ratio of the first argument."""

_FILLS = frozenset("masked_fill index_fill __setitem__ fill_diagonal".split())
_MOVED = frozenset(
    (
        "cat stack hstack vstack dstack column_stack block_diag max min index_add scatter "
        "scatter_add scatter_reduce index_copy index_put masked_scatter copy_"
    ).split()
)
"""Kinds as in `_EQUAL` whose numeric arguments are not values."""

_EQUAL = (_FILLS | _MOVED) | frozenset(
    (
        "add sub rsub where maximum minimum fmax fmin pad clamp clip clamp_min clamp_max gt lt ge "
        "le eq ne __gt__ __lt__ __ge__ __le__ __eq__ __ne__"
    ).split()
)
"""Kinds whose arguments and result have equal ratios; a number among them is 0 or a bound."""

_POWERS = {"square": 2.0, "var": 2.0, "sqrt": 0.5, "rsqrt": -0.5, "reciprocal": -1.0, "inverse": -1}
_NORMS = frozenset("layer_norm rms_norm group_norm batch_norm instance_norm".split())
_DROPOUTS = frozenset(
    "dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout".split()
)
_FREE = frozenset("zeros zeros_like new_zeros empty empty_like new_empty".split())
_ONES = frozenset(
    (
        "ones ones_like new_ones full full_like new_full new_tensor sign sgn argmax argmin arange "
        "tensor as_tensor rand_like randn_like randint_like"
    ).split()
)
"""Kinds whose result does not depend on the ratios of their arguments."""


def find_ties(
    nodes: Sequence[CallNode], plan: Plan, buffers: Mapping[int, str], outputs: Sequence[int]
) -> tuple[Tie, ...]:
    """Returns the equations for the factors of the plain model's parameters.

    buffers: names, by id, of the running statistics of norms. outputs: the nodes of the model's
    results.
    """
    found = _Ratios(nodes, plan, buffers)
    result = CallNode(None, "output")
    for node in outputs:
        found.tie(result, found.ratios[node], {}, "the results are those of the plain model")
    return tuple(found.ties)


def _plus(*ratios: Ratio, times: float = 1.0) -> Ratio:
    result: Ratio = {}
    for ratio in ratios:
        for name, value in ratio.items():
            result[name] = result.get(name, 0.0) + times * value
    return {name: value for name, value in result.items() if value or not name}


def _log(factor: float) -> Ratio:
    return {"": math.log2(factor)} if factor != 1 else {}


@dataclass
class _Call:
    """A call with the ratios of its tensors; None for tensors that fit any ratio, such as zeros."""

    node: CallNode
    step: Step
    inputs: list[Input]
    tensors: list[Tensor]
    ratios: list[Ratio | None]
    output: Ratio

    @property
    def kind(self) -> str:
        return self.node.kind or self.node.name

    @property
    def known(self) -> list[Ratio]:
        return [ratio for ratio in self.ratios if ratio is not None]

    def first(self) -> Ratio | None:
        return self.ratios[0] if self.ratios else {}

    def named(self) -> dict[str, Ratio | None]:
        """The ratios of the tensors by the argument names of the op."""
        op = find_op(self.node.function)
        assert op is not None
        by_id = {id(t): r for t, r in zip(self.tensors, self.ratios, strict=True)}
        given = op.bind(self.node.args, self.node.kwargs, self.node.function)
        return {n: by_id[id(v)] for n, v in given.items() if id(v) in by_id}

    def numbers(self) -> list[float]:
        """The numbers among the arguments that values are added to, compared with or filled
        with."""
        args, kwargs = self.node.args, self.node.kwargs
        if self.kind in _FILLS:
            values = [kwargs.get("value", args[-1])]
        elif self.kind == "pad":
            values = [kwargs.get("value", args[3] if len(args) > 3 else 0)]
        elif self.kind in _MOVED:
            values = []
        else:
            values = [*args, *(v for name, v in kwargs.items() if name != "alpha")]
        return [float(v) for v in values if isinstance(v, int | float) and not isinstance(v, bool)]


class _Ratios:
    def __init__(self, nodes: Sequence[CallNode], plan: Plan, buffers: Mapping[int, str]) -> None:
        self.ties: list[Tie] = []
        self.ratios: list[Ratio | None] = []
        self._buffers = buffers
        self._plan = plan
        for node in nodes:
            self.ratios.append(self._of(node))

    def tie(
        self, node: CallNode, a: Ratio | None, b: Ratio | None, why: str, soft: str = ""
    ) -> None:
        """Adds the equation that two ratios at a call are equal. soft: as in `Tie`."""
        if a is None or b is None:
            return
        difference = _plus(a, _plus(b, times=-1))
        constant = difference.pop("", 0.0)
        if difference or abs(constant) > 1e-9:
            terms = tuple(difference.items())
            self.ties.append(Tie(terms, constant, node.path, node.name, why, soft))

    def _of(self, node: CallNode) -> Ratio | None:
        if node.function is None:
            if node.parameter is not None:
                return {node.parameter: -1.0}
            return None if node.masking or node.zero else {}
        if node.masking:
            return None
        try:
            return self._result(self._call(node))
        except Exception as error:  # arguments that no rule covers; fold names them
            return self._refused(node, str(error))

    def _call(self, node: CallNode) -> _Call:
        step = self._plan.steps.get(node.key) if node.key is not None else None
        step = step or Step()
        given = node.tensors
        used = [i for i in node.inputs if has_scale(given[i.slot])]
        factors = {slot: forward for slot, forward, _ in step.slots}
        tensors = [given[i.slot] for i in used]
        ratios = [self._argument(node, i, factors.get(i.slot, 1.0)) for i in used]
        output = _plus(_factor(step, node), _log(step.output))
        return _Call(node, step, used, tensors, ratios, output)

    def _argument(self, node: CallNode, i: Input, factor: float) -> Ratio | None:
        of_norm = node.kind in _NORMS  # its running statistics
        name = self._buffers.get(id(node.tensors[i.slot])) if of_norm else None
        own = {name: -1.0} if name is not None else self.ratios[i.node]
        return None if own is None else _plus(own, _log(factor))

    def _result(self, call: _Call) -> Ratio | None:
        kind = call.kind
        if kind in RECURRENT:
            return self._refused(call.node, "its factors lie between the steps of the recurrence")
        if kind in LOSSES or not call.ratios:
            result: Ratio | None = self._fixed(call)
        elif kind in _FREE:
            return None
        elif kind in _ONES:
            result = {}
        else:
            result = self._rule(kind)(call)
        return None if result is None else _plus(result, call.output)

    def _rule(self, kind: str) -> Callable[[_Call], Ratio | None]:
        if kind in _KEEPS:
            return _Call.first
        if kind in _EQUAL:
            return self._same
        if kind in PRODUCTS | {"outer", "dot", "vdot", "inner", "multi_dot", "chain_matmul"}:
            return self._product
        if kind in _NORMS:
            return self._norm
        if kind in _POWERS:
            return lambda call: (
                None if (r := call.first()) is None else _plus(r, times=_POWERS[kind])
            )
        rules: dict[str, Callable[[_Call], Ratio | None]] = {
            "mul": self._mul,
            "div": self._div,
            "pow": self._pow,
            "prelu": self._prelu,
            "addcmul": self._addcmul,
            "lerp": self._lerp,
            "normalize": self._normalize,
            "_weight_norm": self._weight_norm,
            "_weight_norm_interface": self._weight_norm,
        }
        return rules.get(kind, self._fixed)

    # Rules

    def _equal(self, call: _Call, ratios: Sequence[Ratio | None], why: str) -> Ratio | None:
        """The common ratio of all of these."""
        known = sorted((r for r in ratios if r is not None), key=len)
        for other in known[1:]:
            self.tie(call.node, other, known[0], why)
        return known[0] if known else None

    def _near_one(self, call: _Call, ratio: Ratio | None) -> None:
        """A norm adds its eps to squares: the error is least if the ratio of its input is 1."""
        self.tie(call.node, ratio, {}, "its eps", "norm")

    def _fixed(self, call: _Call) -> Ratio:
        if call.node.floating:
            for ratio in call.ratios:
                why = "it is not homogeneous: the ratio of its argument is 1"
                self.tie(call.node, ratio, {}, why)
        return {}

    def _refused(self, node: CallNode, why: str) -> Ratio:
        """Adds an equation without a solution."""
        self.ties.append(Tie((), 1.0, node.path, node.name, why))
        return {}

    def _same(self, call: _Call) -> Ratio | None:
        if call.kind in ("max", "min") and len(call.ratios) == 1:
            return call.first()
        ratio = self._equal(call, call.ratios, "its terms have one ratio")
        bounds = call.numbers()
        small = [n for n in bounds if 0 < abs(n) <= SMALL]
        if small:
            self._near_one(call, ratio)
        if any(SMALL < abs(n) < -MASKING for n in bounds):
            why = "a number is added or compared: the ratio of the other term is 1"
            self.tie(call.node, ratio, {}, why)
        return ratio

    def _product(self, call: _Call) -> Ratio | None:
        node = call.node
        if call.kind in ATTENTION:
            return self._attention(call)
        added = next((n for n, i in enumerate(call.inputs) if is_added(call.kind, i.slot)), None)
        bias = None if added is None else _of_added(call, added)
        ratios = [ratio for n, ratio in enumerate(call.ratios) if n != added]
        if any(ratio is None for ratio in ratios):
            return bias
        result = _plus(*(r for r in ratios if r is not None))
        self.tie(node, ratios[0], {}, "", "input")
        self.tie(node, bias, result, "its bias has the ratio of its output")
        return result

    def _attention(self, call: _Call) -> Ratio | None:
        node, given = call.node, call.named()
        settings = OPS[call.kind].bind(node.args, node.kwargs, node.function)
        width = settings["query"].shape[-1]
        plain = settings.get("scale")
        own = 1 / width if plain is None and call.step.op == call.kind else plain
        temperature = (own or width**-0.5) / (plain or width**-0.5)
        query, key = given["query"], given["key"]
        if query is not None and key is not None:
            why = "the ratios of its queries, keys and scale cancel"
            self.tie(node, _plus(query, key, _log(temperature)), {}, why)
        self.tie(node, given.get("attn_mask"), {}, "its mask has the ratio 1")
        return given["value"]

    def _norm(self, call: _Call) -> Ratio | None:
        node, given = call.node, call.named()
        x = given.get("input")
        self._near_one(call, x)
        if x is not None:
            for name, power in (("running_mean", 1.0), ("running_var", 2.0)):
                why = f"its {name} has the ratio of its input"
                self.tie(node, given.get(name), _plus(x, times=power), why)
        weight = given.get("weight", {})
        self.tie(node, given.get("bias"), weight, "its bias has the ratio of its gain")
        return weight

    def _normalize(self, call: _Call) -> Ratio:
        self._near_one(call, call.first())
        return {}

    def _mul(self, call: _Call) -> Ratio | None:
        if call.step.op == "times":  # the number is a tensor or a scalar
            values = zip(call.tensors, call.ratios, strict=True)
            return max(values, key=lambda pair: pair[0].numel())[1]
        return None if None in call.ratios else _plus(*call.known)

    def _div(self, call: _Call) -> Ratio | None:
        if call.step.op == "times":
            return self._mul(call)
        if None in call.ratios:
            return None
        divisor = (0,) if call.node.name.startswith("__r") else (1,)
        signs = [-1.0 if i.slot in (divisor, ("other",)) else 1.0 for i in call.inputs]
        return _plus(*(_plus(r, times=s) for r, s in zip(call.known, signs, strict=True)))

    def _pow(self, call: _Call) -> Ratio | None:
        numbers, ratio = call.numbers(), call.first()
        if len(call.ratios) > 1:
            numbers = [float(t) for t in call.tensors[1:] if t.numel() == 1]
        base = isinstance(call.node.args[0], Tensor) and not call.node.name.startswith("__r")
        if not (numbers and base):
            return self._fixed(call)
        return None if ratio is None else _plus(ratio, times=numbers[0])

    def _prelu(self, call: _Call) -> Ratio | None:
        value, slope = call.ratios
        self.tie(call.node, slope, {}, "its slope has the ratio 1")
        return value

    def _weight_norm(self, call: _Call) -> Ratio | None:
        """A direction, independent of the norm of its input, times a magnitude."""
        return call.ratios[1]

    def _addcmul(self, call: _Call) -> Ratio | None:
        added, *others = call.ratios
        if any(r is None for r in others):
            return added
        product = _plus(*(r for r in others if r is not None))
        return self._equal(call, (added, product), "its terms have one ratio")

    def _lerp(self, call: _Call) -> Ratio | None:
        start, end, *weight = call.ratios
        for ratio in weight:
            self.tie(call.node, ratio, {}, "its weight has the ratio 1")
        return self._equal(call, (start, end), "its terms have one ratio")


def _of_added(call: _Call, index: int) -> Ratio | None:
    """The ratio of the added term of a product, without the factor of the product."""
    node, bias = call.node, call.ratios[index]
    if bias is None or call.step.op != "addmm":
        return bias
    given = OPS["addmm"].bind(node.args, node.kwargs, node.function)
    if is_bias(given["input"], given["mat2"]):
        return bias
    own = 1 / (math.hypot(given["alpha"], given["beta"]) or 1.0)
    return _plus(bias, _log(own), _plus(_factor(call.step, node), times=-1))


def _factor(step: Step, node: CallNode) -> Ratio:
    """The factor between the results of the step's op and of the plain call.

    Raises ValueError for a function in ``replace``.
    """
    if step.op is None or node.kind in _DROPOUTS:
        return {}
    if step.op == "replace":
        raise ValueError("it is replaced, by a function that the plain model does not call")
    if step.op == "times":
        return _log(abs(step.factor / _number(node)))
    if step.op not in OPS:
        return _log(step.factor)
    settings = {"constraint": step.constraint, **dict(step.settings)}
    if node.kind in PRODUCTS:
        settings["dropout_p"] = 0.0
    scales = OPS[step.op].scales(node.args, node.kwargs, func=node.function, **settings)
    return _log(abs(scales["output"]))


def _number(node: CallNode) -> float:
    """The number that a call multiplies a value by."""
    values = [*node.args, *node.kwargs.values()]
    numbers = [float(v) for v in values if isinstance(v, int | float)]
    tensors = [v for v in values if isinstance(v, Tensor)]
    if len(tensors) > 1:
        numbers = [float(min(tensors, key=Tensor.numel))]
    number = numbers[0] if numbers else 1.0
    return 1 / number if node.kind == "div" and not node.name.startswith("__r") else number
