"""Sets the values of a model's parameters so that activations have RMS 1 at initialization.

A factor of a product is a number that its weight can hold: the layer computes the same function,
and trains the same if its learning rate has the number too (the symmetry of multiplier,
initialization and rate: Tensor Programs IV, arXiv 2011.14522; u-muP, arXiv 2407.17465, section
2.1). So every factor of unit scaling is multiplied into a parameter, and the model stays plain.

1. A pass is recorded, with the results of products at RMS 1. The planner classifies calls.
2. A second pass sets each weight when a product first reads it: the rule of the product, divided by
   the RMS of its operand.
3. Further passes measure residual streams and products whose weight has another reader (a tied
   head), and multiply what holds their scale.
"""

from __future__ import annotations

import math
import re
import weakref
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from fp8.common.report import LEFT_ALONE, Report
from fp8.common.step import Batch

from ...ops.recurrent import GRU_FACTOR, LSTM_FACTOR, RELU_FACTOR, TANH_FACTOR
from ...parameter import remember_tags, retag, tags_of
from ...rules.rates import fan_in
from ..install import Args, Kwargs
from ..plan.plan import CallRow, ModelPlan
from ..plan.planner import Planner
from ..plan.weights import keep_values, named_tags, prepare
from ..record.calls import Input, tensors_in
from ..record.kinds import ATTENTION, EMBEDDINGS, RECURRENT, is_added
from ..record.values import has_scale, rms_of
from ..run.learn import REACH
from ..run.ranks import agreed, model_name
from .passes import Pass, Place, run_pass
from .sources import Holder, Sources
from .streams import find_branches

LOWEST, HIGHEST = 2.0**-12, 2.0**4
"""A number outside of these is reported."""

GRID = 0.25
"""What is measured is rounded to so many octaves, so that parameters share learning rates: an
optimizer steps those of each rate by themselves."""

ROUNDS = 4
"""Of corrections: the branches of a stream follow each other."""

REPORTS: weakref.WeakKeyDictionary[nn.Module, Report[CallRow]] = weakref.WeakKeyDictionary()
"""A model -> what was done to its parameters."""


class _Setter:
    """Sets the values of ``model``, in place, to what they should be for ``batch``. plain: the
    parameters of the model that it is a copy of, by name."""

    def __init__(self, model: nn.Module, plain: dict[str, nn.Parameter], batch: Batch) -> None:
        self.model, self.plain, self.batch = model, plain, batch
        self.parameters = dict(model.named_parameters())
        self.numbers: dict[str, float] = defaultdict(lambda: 1.0)
        self.shifts: dict[str, float] = {}
        self.rows: dict[str, CallRow] = {}
        self.kept: dict[str, CallRow] = {}
        self._classify()

    def _classify(self) -> None:
        for row in prepare(self.model):
            self.rows[_named(row.path, row.call)] = row
        seen = run_pass(self.model, self.batch, normalizes=True)
        self.nodes, self.index_of = seen.nodes, seen.places
        self.place_of = {index: place for place, index in seen.places.items()}
        tags = named_tags(self.model, "")
        self.planner = Planner(self.nodes, ModelPlan(), tags, seen.outputs, changed=seen.changed)
        self._keep(self.planner.kept, self.planner.added())
        for name in self.planner.inner:
            parameter = self.parameters[name]
            retag(parameter, tags_of(parameter)._replace(mup_type="weight"))
        scaled = self.planner.scaled - self.planner.kept
        self.rules: dict[int, float] = {}
        self.weights: dict[int, Input] = {}
        first: dict[str | None, int] = {}
        for index, step in self.planner.decided()[0].items():
            own = [i for i in self._factors(index) if self._origin(i) in scaled]
            kind = self.nodes[index].kind
            # A query that is a parameter is an operand: its size is that of logits.
            if step is None or step.op is None or not own or kind in ATTENTION:
                continue
            first.setdefault(self._origin(own[-1]), index)
            if kind not in RECURRENT:
                self.weights[index], self.rules[index] = own[-1], step.factor
        #: The calls that are the first to read a weight.
        self.first = set(first.values())
        lookups = [node.inputs for node in self.nodes if node.kind in EMBEDDINGS]
        tables = {self._origin(i) for inputs in lookups for i in inputs}
        read = {self._origin(i) for i in self.weights.values()}
        #: The tables that are weights of products too.
        self.tables = {name for name in scaled if name in read & tables}
        flow = self.planner.flow
        self.sources = Sources(self.nodes, flow, self.weights, self.tables)
        self.branches = find_branches(flow, self.planner.branches(), seen.outputs)

    def _origin(self, i: Input) -> str | None:
        return self.nodes[i.node].value.origin

    def _size(self, seen: Pass, index: int) -> float:
        """The RMS of the result of a call in a pass; 1 where that does not make the call."""
        place = self.place_of.get(index)
        return 1.0 if place is None else seen.sizes.get(place, 1.0)

    def _factors(self, index: int) -> list[Input]:
        """The arguments that a call multiplies."""
        node = self.nodes[index]
        return [i for i in node.inputs if not is_added(node.kind, i.slot)]

    @torch.no_grad()
    def _keep(self, kept: frozenset[str], added: dict[str, float]) -> None:
        """Gives weights that calls read in other ways than as weights their plain values."""
        keep_values(self.model, "", kept, added)
        for name in sorted(kept):
            self.parameters[name].copy_(self.plain[name])  # without the error of two roundings
            why = "added to values" if name in added else "read by calls that are no products"
            self.rows[name] = CallRow(*_split(name), "keeps its values", why)
            path, leaf = _split(name)
            bias = _named(path, leaf.replace("weight", "bias"))
            if bias != name and bias in self.parameters:
                self.parameters[bias].copy_(self.plain[bias])
                self.kept[bias] = CallRow(*_split(bias), "keeps its values", "as its weight")

    # the second pass

    def before(self, place: Place, args: Args, kwargs: Kwargs) -> None:
        """Sets the weights of a call before it runs."""
        index, kind = self.index_of.get(place), place[1]
        if index is None or index not in self.first:
            return
        tensors = dict((*tensors_in(args), *tensors_in(kwargs)))
        if kind in RECURRENT:
            self._set_recurrent(index, kind, tensors)
            return
        node, weight = self.nodes[index], self.weights[index]
        name = self._origin(weight)
        assert name is not None
        if name in self.tables:
            return
        factors = [i.slot for i in self._factors(index) if i is not weight]
        operands = [tensors[slot] for slot in factors if has_scale(tensors[slot])]
        number = self.rules[index] / math.prod(map(_off_one, operands))
        self._multiply(Holder(name), number)
        self._tag_fan_in(name, index)
        moved, parameter = tensors[weight.slot], self.parameters[name]
        if moved.untyped_storage().data_ptr() != parameter.untyped_storage().data_ptr():
            moved.data.mul_(number)  # a copy in another dtype or order
        for i in node.inputs:
            bias = self._origin(i)
            if is_added(kind, i.slot) and bias in self.parameters:
                self._multiply(Holder(bias), number)
                self._restore(bias, parameter)

    def _tag_fan_in(self, name: str, index: int) -> None:
        """Tags a weight whose layout is not (outputs, inputs, ...) with its fan-in, of which the
        rule of the product is the inverse root; that of a readout the inverse."""
        parameter, kind = self.parameters[name], self.nodes[index].kind
        tags = tags_of(parameter)
        power = -1 if tags.mup_type == "output" else -2
        terms = max(round(self.rules[index] ** power), 1)
        shape = parameter.shape[1:] if tags.mup_stacked else parameter.shape
        # The rule of a convolution leaves out the terms that its padding adds.
        if kind not in ("conv1d", "conv2d", "conv3d") and terms != fan_in(shape):
            retag(parameter, tags._replace(mup_fan_in=terms))

    @torch.no_grad()
    def _restore(self, name: str, weight: Tensor) -> None:
        """Gives a bias that carries information its plain values: one of a layer of zeros, or one
        that no initialization of torch gives, which is zeros or within 1/sqrt(fan_in) of 0."""
        bias = self.plain[name]
        bound = 1.001 * fan_in(weight.shape) ** -0.5
        if not bool(weight.any()) or bool((bias.abs() > bound).any()):
            self.parameters[name].copy_(bias)
            why = "carries information: no initialization of torch gives its values"
            self.kept[name] = CallRow(*_split(name), "keeps its values", why)

    def _set_recurrent(self, index: int, kind: str, tensors: dict[Any, Tensor]) -> None:
        """Sets the weights of torch's own recurrent layer to those of `unit_scaling.ops.recurrent`,
        whose hidden state is torch's times ``size``."""
        size, gates = _CELLS[kind.removesuffix("_cell")]
        node = self.nodes[index]
        norm = (1 + 1 / gates) ** -0.5
        names = [self._origin(i) for i in node.inputs]
        for name in [n for n in names if n in self.parameters and "weight_" in n]:
            outputs, inputs = self.parameters[name].shape
            number = norm * outputs**-0.5 * size
            if "weight_ih" in name:
                number = norm * inputs**-0.5
                number *= size if "_l0" not in name else 1 / _off_one(tensors[node.inputs[0].slot])
            self._multiply(Holder(name), number)
            if (bias := name.replace("weight_", "bias_")) in self.parameters:
                fan = inputs if "weight_ih" in name else outputs
                self._multiply(Holder(bias), norm * fan**-0.5)

    @torch.no_grad()
    def _multiply(self, holder: Holder, number: float) -> None:
        name, shift = holder.parameter, holder.shift
        # number * (shift + w) = shift + w'. As data: the running pass may hold views of a weight,
        # of which autograd refuses those that several results of one call are.
        self.parameters[name].data.add_(shift).mul_(number).sub_(shift)
        self.numbers[name] *= number
        self.shifts[name] = shift

    # the passes that correct

    def correct(self, seen: Pass, is_first: bool) -> bool:
        """Brings branches to their weights, and products of tables to their rule. Returns whether
        something was off."""
        done = set[Holder]()
        asked = [(b.add, b.end, b.weight * self._size(seen, b.stream)) for b in self.branches]
        for index, weight in self.weights.items():
            factors = [i for i in self._factors(index) if i is not weight]
            if self._origin(weight) in self.tables and len(factors) == 1:
                asked.append((index, factors[0].node, self.rules[index]))
        changed = [self._bring(seen, *each, done, is_first) for each in asked]
        return any(changed)

    def _bring(
        self, seen: Pass, reader: int, end: int, wanted: float, done: set[Holder], is_first: bool
    ) -> bool:
        """Brings the result of the call ``end``, as ``reader`` reads it, to an RMS."""
        size = self._size(seen, end)
        if not wanted or not (size or is_first):
            return False  # zeros have the number of their rule since the first pass
        ratio = _rounded(wanted / (size or 1.0))
        if ratio == 1.0:
            return False
        holders = self.sources.holders(end, reader)
        node = self.nodes[reader]
        if holders is None:
            kind = self.nodes[end].kind or "an input"
            why = f"ends in {kind}, which no parameter scales alone: {ratio:.3g} is missing"
            key = f"{node.path}.{node.name} {node.where}"
            self.rows[key] = CallRow(node.path, node.name, LEFT_ALONE, why)
            return False
        if not done.isdisjoint(holders):
            return False
        done.update(holders)
        for holder in holders:
            self._multiply(holder, ratio)
        return True

    # the result

    @torch.no_grad()
    def finish(self) -> Report[CallRow]:
        """Rounds each parameter once, tags it, and reports it."""
        last = run_pass(self.model, self.batch)
        results = {self._origin(w): self._size(last, i) for i, w in self.weights.items()}
        self._set_siblings()
        self._agree()
        for name, parameter in self.parameters.items():
            # Rounded, as equal numbers are products of others in another order.
            tags, number = tags_of(parameter), float(f"{self.numbers[name]:.14g}")
            if not math.isfinite(number) or not bool(parameter.isfinite().all()):
                raise ValueError(
                    f"unit_scale: {name} came out as {number:.3g} times what it was, as the batch "
                    "gives values that are not finite. The model is as it was"
                )
            total = number / (tags.mup_divisor or 1.0)
            if tags.mup_divisor and not self.shifts.get(name):
                parameter.copy_(self.plain[name].double() * total)  # rounded once
            retag(parameter, tags._replace(mup_scale=tags.mup_scale * number))
            row = self.kept.get(name) or self.rows.get(name)
            is_multiplied = (tags.mup_divisor or number != 1.0) and bool(parameter.any())
            if is_multiplied and name not in self.kept:
                why = f"multiplied by {total:.4g}"
                if name in results:
                    why += f": its result has RMS {results[name]:.3g}"
                if not LOWEST <= number <= HIGHEST:
                    why += f"; {number:.3g} times the weight of RMS 1 is outside of 2^-12 to 2^4"
                self.rows[name] = CallRow(*_split(name), "scaled", why)
            elif row is not None:
                self.rows[name] = row
        if last.has_nan:
            kind = type(self.model).__name__
            raise ValueError(
                f"unit_scale: the output of {kind} has NaN for this batch. The model is as it was"
            )
        remember_tags(self.model)
        return Report(self.rows.values(), heading="parameter")

    def _agree(self) -> None:
        """Takes the numbers of the first process, as learning rates follow from them: each process
        has a batch of its own."""
        own = {name: self.numbers[name] for name in self.parameters}
        for name, number in agreed(f"{model_name(own)}/values", own).items():
            if number != own[name]:
                holder = Holder(name, self.shifts.get(name, 0.0))
                self._multiply(holder, number / own[name])
                self.numbers[name] = number

    @torch.no_grad()
    def _set_siblings(self) -> None:
        """Sets weights that the batch has not reached (an expert) as those of their siblings: the
        same parameter of other items of a list of modules."""
        read = {self._origin(i) for i in self.weights.values()}
        for name, parameter in self.parameters.items():
            tags = tags_of(parameter)
            if name not in self.planner.kept or name in read:
                continue
            pattern = re.sub(r"\\\.\d+\\\.", r"\\.\\d+\\.", re.escape(name))
            alike = [n for n in read if n and re.fullmatch(pattern, n)]
            like = [n for n in alike if self.parameters[n].shape == parameter.shape]
            if like and "." in name and pattern != re.escape(name):
                size = rms_of(parameter)
                number = self.numbers[like[0]]
                self.numbers[name] = number
                parameter.mul_(number / size)
                retag(parameter, tags._replace(mup_scale=1.0, mup_divisor=size))


_CELLS = {
    "lstm": (LSTM_FACTOR, 4),
    "gru": (GRU_FACTOR, 3),
    "rnn_tanh": (TANH_FACTOR, 1),
    "rnn_relu": (RELU_FACTOR, 1),
}
"""Kind of a recurrent layer -> (its hidden state over torch's, its gates)."""


def _off_one(tensor: Tensor) -> float:
    """The RMS of an operand on the `GRID`, 1 within `REACH`."""
    size = rms_of(tensor)
    return _rounded(size) if abs(math.log2(size)) > REACH else 1.0


def _rounded(size: float) -> float:
    return float(2.0 ** (round(math.log2(size) / GRID) * GRID))


def _named(path: str, leaf: str) -> str:
    return f"{path}.{leaf}" if path else leaf


def _split(name: str) -> tuple[str, str]:
    path, _, leaf = name.rpartition(".")
    return path, leaf


def has_values_set(model: nn.Module) -> bool:
    """Whether `unit_scale` has set the values of a parameter of ``model`` for a batch."""
    tags = [tags_of(p) for p in model.parameters()]
    return any(each.mup_divisor and each.mup_scale != 1.0 for each in tags)


def set_values(model: nn.Module, plain: nn.Module, batch: Batch) -> None:
    """Sets the parameters of ``model``, a copy of ``plain``, in place, and tags them. Raises
    ValueError for values that are not finite, and for parameters without values."""
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ValueError(f"unit_scale: {name} is on the meta device: give it values before")
    setter = _Setter(model, dict(plain.named_parameters()), batch)
    run_pass(model, batch, before=setter.before)
    for number in range(ROUNDS):
        if not setter.correct(run_pass(model, batch), is_first=not number):
            break
    REPORTS[model] = setter.finish()
