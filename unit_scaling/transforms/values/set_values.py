"""Decides by which numbers a model's parameters are multiplied so that activations have RMS 1 at
initialization.

A factor of a product is a number that its weight can hold: the layer computes the same function,
and trains the same if its learning rate has the number too (the symmetry of multiplier,
initialization and rate: Tensor Programs IV, arXiv 2011.14522; u-muP, arXiv 2407.17465, section
2.1). So every factor of unit scaling is multiplied into a parameter, and the model stays plain.

1. A pass is recorded, with the results of products at RMS 1. Calls are classified.
2. A second pass sets each weight when a product first reads it: the rule of the product, divided by
   the RMS of its operand. When a residual add reads a branch, or a product with a tied table its
   operand, what holds the scale of that is multiplied too.
3. Further passes check this, and correct what parts of the model share.

The parameters of the model are changed meanwhile, and restored.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fp8.common.dtensor import part_of
from fp8.common.report import LEFT_ALONE, Row
from fp8.common.step import storage_of

from ...common.calls import Args, Given, Kwargs, T
from ...ops.recurrent import GRU_FACTOR, LSTM_FACTOR, RELU_FACTOR, TANH_FACTOR
from ...parameter import Tags, tags_of
from ...rules.rates import fan_in
from ..record.calls import Input, Place, Recorder, Slot, arguments_in
from ..record.kinds import CONVOLUTIONS, EMBEDDINGS, RECURRENT
from ..record.values import has_scale, is_any, rms_of
from .classify import Classes
from .parameters import Change, joined, starts_of, weight_start
from .passes import Sizes, read_size, reshard, run_pass
from .ranks import agreed
from .sources import Holder, Sources
from .streams import Target, weighted_branches

LOWEST = 2.0**-12
HIGHEST = 2.0**4
"""A number outside of these is reported."""

REACH = 1.5
"""The allowed error of log2(RMS). [1/4, 4] allows 2; 0.5 is left for variation between batches."""

GRID = 0.25
"""What is measured is rounded to so many octaves, so that parameters share learning rates: an
optimizer steps those of each rate by themselves."""

PASSES = 6
"""The largest number of passes that set values."""


class Decision(NamedTuple):
    """What `unit_scale` does with a model: the changes of its parameters by name, and the rows of
    the report."""

    changes: dict[str, Change]
    rows: list[Row]


@torch.no_grad()
def decide(model: nn.Module, given: Given, title: str) -> Decision:
    """Decides for ``model`` as it runs on these arguments. title: as of `model_name`.

    Raises ValueError for values that are not finite, and for parameters without values.
    """
    reshard(model)
    plain = {}
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ValueError(
                f"unit_scale: {name} is on the meta device: give it values before"
            )
        plain[name] = parameter.detach().clone()
    try:
        setter = _Setter(model, plain, given, title)
        for number in range(PASSES):
            has_nan = setter.run_pass()
            if number and not setter.multiplied:
                break
        return setter.finish(has_nan)
    finally:
        reshard(model)
        for name, parameter in model.named_parameters():
            parameter.data.copy_(plain[name])


class _Setter:
    """Sets the values of ``model``, in place, to what they should be for these arguments. plain:
    its values before, by name. name: of the model in all processes."""

    def __init__(
        self, model: nn.Module, plain: Mapping[str, Tensor], given: Given, name: str
    ) -> None:
        self.model = model
        self.plain = plain
        self.given = given
        self.name = name
        self.parameters = dict(model.named_parameters())
        self.changes = {name: Change(tags_of(p)) for name, p in self.parameters.items()}
        self.rows: dict[str, Row] = {}
        self.kept_biases: set[str] = set()
        for name, change in starts_of(model).items():
            if change.done:
                self._row(name, change.done, change.why)
            self.changes[name] = change
            self._write(name)
        seen = Recorder(model)
        run_pass(model, given, seen)
        self.nodes = seen.nodes
        self.index_of = seen.index_of
        self._correct_gains(Classes(seen, self._tags()).weights)
        self.classes = Classes(seen, self._tags())
        self.flow = self.classes.flow
        self._keep()
        for name in self.classes.inner:
            self._tag(name, mup_type="weight")
        self._find_weights()
        self.sources = Sources(self.flow, self.weights, self.tables)
        self._find_targets(seen.outputs)
        self.written = seen.written
        self.passes = 0
        self.multiplied: set[Holder] = set()  # in the last pass

    def _tags(self) -> dict[str, Tags]:
        return {name: change.tags for name, change in self.changes.items()}

    def _correct_gains(self, weights: Collection[str]) -> None:
        """Begins anew with weights of one row, or one column, that were taken for gains."""
        for name in weights:
            parameter = self.parameters[name]
            kind = self.changes[name].tags.mup_type
            if kind == "norm" and parameter.dim() > 1:
                parameter.data.copy_(self.plain[name])
                self.changes[name] = change = weight_start(self.model, parameter)
                self._row(name, change.done, change.why)

    def _find_weights(self) -> None:
        """Finds the products that read weights, and which of these read one first."""
        self.rules: dict[int, float] = {}
        self.weights: dict[int, Input] = {}
        origin = self.flow.origin
        scaled = self.classes.scaled - self.classes.kept
        first: dict[str | None, int] = {}
        for index, node in enumerate(self.nodes):
            factor = self.classes.factor(index)
            if factor is None:
                continue
            weight = [i for i in node.factors if origin(i) in scaled][-1]
            first.setdefault(origin(weight), index)
            if node.kind not in RECURRENT:
                self.weights[index] = weight
                self.rules[index] = factor
        self.first = set(first.values())
        lookups = [node.inputs for node in self.nodes if node.kind in EMBEDDINGS]
        tables = {origin(i) for inputs in lookups for i in inputs}
        #: The tables that are weights of products too.
        self.tables = scaled & tables & {origin(i) for i in self.weights.values()}

    def _find_targets(self, outputs: Collection[int]) -> None:
        """Finds the branches of residual streams, and the operands of products with tables."""
        flow = self.flow
        targets = weighted_branches(flow, self.classes.branches, outputs)
        for target in targets:
            if target.keeps:
                self._keep_sizes(target)
        for index, weight in self.weights.items():
            factors = [i for i in self.nodes[index].factors if i is not weight]
            if flow.origin(weight) in self.tables and len(factors) == 1:
                targets.append(Target(index, factors[0].node, self.rules[index]))
        self.targets: dict[int, list[Target]] = defaultdict(list)
        for target in targets:
            self.targets[target.reader].append(target)

    def run_pass(self) -> bool:
        """Sets values in a pass, and measures the results of products with weights. Whether the
        output has NaN."""
        self.multiplied.clear()
        seen = Sizes(self.name_of, self.before)
        # The dict alone: ``seen`` refers to this object, and a cycle would keep parameters alive.
        self.sizes = seen.sizes
        run_pass(self.model, self.given, seen)
        # A parameter that the model writes is as it was before the pass.
        for name in self.written:
            self._write(name)
        self.passes += 1
        return seen.has_nan

    def name_of(self, place: Place) -> str | None:
        """The weight of a product."""
        weight = self.weights.get(self.index_of.get(place, -1))
        if weight is None:
            return None
        return self.flow.origin(weight)

    def _agreed(self, what: str, value: T) -> T:
        """The value of the first process: each has a batch of its own, and learning rates follow
        from the numbers. A model that is divided has to take the same ones at once."""
        return agreed(self.name, {what: value})[what]

    def _row(self, name: str, done: str, why: str) -> None:
        path, _, leaf = name.rpartition(".")
        self.rows[name] = Row(path, leaf, done, why)

    def _tag(self, name: str, **tags: Any) -> None:
        change = self.changes[name]
        change.tags = change.tags._replace(**tags)

    def _write(self, name: str) -> None:
        """Gives a parameter its values. As data: the running pass may hold views of it, of which
        autograd refuses those that several results of one call are."""
        values = self.changes[name].values(self.plain[name])
        self.parameters[name].data.copy_(values)

    def _multiply(self, holder: Holder, number: float) -> None:
        change = self.changes[holder.parameter]
        change.number *= number
        change.shift = holder.shift
        self._write(holder.parameter)

    # what keeps its values

    def _keep(self) -> None:
        """Gives weights that calls read in other ways than as weights their plain values. A readout
        becomes a weight, and what is added to values a bias of their size."""
        classes = self.classes
        classes.kept = frozenset(self._agreed("kept", sorted(classes.kept)))
        inside = classes.inside
        for name in sorted(classes.kept):
            tags = self.changes[name].tags
            why = inside.get(name, "read by calls that are no products")
            size = tags.mup_divisor or 1.0
            kind = tags.mup_type
            if name in classes.added:
                size = classes.added[name]
                kind = "bias"
                why = "added to values"
            elif kind == "output":
                kind = "weight"
            size = _nearest_power(self._agreed(f"kept {name}", size))
            self._tag(name, mup_type=kind, mup_divisor=None, mup_scale=size)
            self._keep_one(name, why)
            path, _, leaf = name.rpartition(".")
            bias = joined(path, leaf.removesuffix("_orig").replace("weight", "bias"))
            if bias == name or bias not in self.parameters:
                continue
            self._keep_one(bias, "as its weight")
            self.kept_biases.add(bias)
            if kind == "weight":
                # The layer is s * (u @ x / sqrt(n) + b / s) for u of RMS 1 and this size s.
                scale = size * fan_in(self.plain[name].shape) ** 0.5
                self._tag(bias, mup_scale=_nearest_power(scale))

    def _keep_one(self, name: str, why: str) -> None:
        change = self.changes[name]
        change.start = 1 / change.number
        self._write(name)
        self._row(name, "keeps its values", why)

    def _keep_sizes(self, target: Target) -> None:
        """Keeps the values of what holds the scale of a branch in units of data."""
        for holder in self.sources.holders(target.end, target.reader) or ():
            name = holder.parameter
            self.changes[name].keeps = True
            self._write(name)
            self._row(name, "keeps its values", "ends a sum in units of data")

    @torch.no_grad()
    def _keep_information(self, name: str, weight: Tensor) -> None:
        """Keeps a bias that carries information: one of a layer of zeros, or one that no
        initialization of torch gives, which is zeros or within 1/sqrt(fan_in) of 0."""
        bias = self.plain[name]
        bound = 1.001 * fan_in(weight.shape) ** -0.5
        if not is_any(weight) or is_any(bias.abs() > bound):
            self._keep_one(
                name, "carries information: no initialization of torch gives its values"
            )
            self.kept_biases.add(name)

    def before(self, place: Place, args: Args, kwargs: Kwargs) -> None:
        """Sets the weights of a call before it runs, the first time, and what holds the scales of
        its targets."""
        index = self.index_of.get(place, -1)
        tensors = arguments_in(args, kwargs)
        for target in self.targets.get(index, ()):
            self._bring_operand(target, tensors)
        if self.passes or index not in self.first:
            return
        if place.kind in RECURRENT:
            self._set_recurrent(index, place.kind, tensors)
        else:
            self._set_weight(index, tensors)

    def _bring_operand(self, target: Target, tensors: Mapping[Slot, Tensor]) -> None:
        """Brings an argument of the call that is about to run to its target."""
        slots = {i.node: i.slot for i in self.nodes[target.reader].inputs}
        name = f"{self.passes} bring {target.reader} {target.end}"
        end = tensors[slots[target.end]]
        wanted = target.rms
        if target.stream is not None:
            stream = tensors[slots[target.stream]]
            wanted *= self._agreed(f"{name} stream", read_size(stream))
        size = read_size(end)
        if target.keeps:
            size *= self._of_rates(target)
        size = self._agreed(name, size)
        ratio = self._bring(target, size, wanted)
        if ratio != 1.0 and not target.keeps:
            # Torch refuses to write an expanded tensor: the next pass sees it.
            with suppress(RuntimeError):
                end.data.mul_(ratio)

    def _of_rates(self, target: Target) -> float:
        """By what a result that keeps its size would be multiplied if its holder had the size that
        the learning rate is for: a product of RMS 1, or a gain or table of RMS 1."""
        holders = self.sources.holders(target.end, target.reader)
        if not holders:
            return 1.0
        held = holders[0].parameter
        if self.sizes.get(held):
            return 1 / self.sizes[held]
        return self.changes[held].start

    def _set_weight(self, index: int, tensors: Mapping[Slot, Tensor]) -> None:
        """Sets the weight and the bias of a product."""
        node = self.nodes[index]
        weight = self.weights[index]
        name = self.flow.origin(weight)
        assert name is not None
        if name in self.tables:
            return
        factors = [i.slot for i in node.factors if i is not weight]
        operands = [tensors[slot] for slot in factors if has_scale(tensors[slot])]
        number = self.rules[index] / math.prod(map(_off_one, operands))
        number = self._agreed(f"set {name}", number)
        self._multiply(Holder(name), number)
        self._tag_fan_in(name, index)
        moved = tensors[weight.slot]
        parameter = self.parameters[name]
        is_copy = storage_of(part_of(moved)) != storage_of(part_of(parameter))
        if is_copy and not self.changes[name].keeps:
            # A copy in another dtype or order, or what FSDP has gathered.
            moved.data.mul_(number)
        for bias in map(self.flow.origin, node.added):
            if bias in self.parameters:
                self._multiply(Holder(bias), number)
                self._keep_information(bias, parameter)

    def _tag_fan_in(self, name: str, index: int) -> None:
        """Tags a weight whether it is a matrix, and, if its layout is not (outputs, inputs, ...),
        with its fan-in, of which the rule of the product is the inverse root; that of a readout the
        inverse."""
        parameter = self.parameters[name]
        tags = self.changes[name].tags
        kind = self.nodes[index].kind
        power = -1 if tags.mup_type == "output" else -2
        terms = max(round(self.rules[index] ** power), 1)
        is_matrix = kind not in CONVOLUTIONS
        stacked = tags.mup_stacked and is_matrix
        shape = parameter.shape[stacked:]
        self._tag(name, mup_matrix=is_matrix, mup_stacked=stacked)
        # The rule of a convolution leaves out the terms that its padding adds.
        if kind not in ("conv1d", "conv2d", "conv3d") and terms != fan_in(shape):
            self._tag(name, mup_fan_in=terms)

    def _set_recurrent(
        self, index: int, kind: str, tensors: Mapping[Slot, Tensor]
    ) -> None:
        """Sets the weights of torch's own recurrent layer to those of `unit_scaling.ops.recurrent`,
        whose hidden state is torch's times ``cell.size``."""
        cell = _CELLS[kind.removesuffix("_cell")]
        inputs = self.nodes[index].inputs
        # By its rule: divided by the size of its state, a recurrence became chaotic.
        norm = (1 + 1 / cell.gates) ** -0.5
        names = [self.flow.origin(i) for i in inputs]
        for name in [n for n in names if n in self.parameters and "weight_" in n]:
            is_first = "weight_ih" in name
            fan = self.parameters[name].shape[is_first]
            size = cell.size
            if is_first and "_l0" in name:
                operand = _off_one(tensors[inputs[0].slot])
                size = 1 / self._agreed(f"operand {name}", operand)
            self._multiply(Holder(name), norm * fan**-0.5 * size)
            bias = name.replace("weight_", "bias_")
            if bias in self.parameters:
                self._multiply(Holder(bias), norm * fan**-0.5)

    def _bring(self, target: Target, size: float, wanted: float) -> float:
        """Brings a result of RMS ``size`` to another one. Returns by what it is multiplied."""
        # Zeros have the number of their rule since the first pass, and rates alone theirs.
        is_set = self.passes and (target.keeps or not size)
        if is_set or not wanted:
            return 1.0
        ratio = _rounded(wanted / (size or 1.0))
        if ratio == 1.0:
            return 1.0
        holders = self.sources.holders(target.end, target.reader)
        if holders is None:
            node = self.nodes[target.reader]
            end = self.nodes[target.end]
            kind = end.kind or "an input"
            why = f"ends in {kind}, which no parameter scales alone: {ratio:.3g} is missing"
            key = f"{node.path}.{node.name} {kind}"
            self.rows[key] = Row(node.path, node.name, LEFT_ALONE, why)
            return 1.0
        keeps = [self.changes[holder.parameter].keeps for holder in holders]
        is_kept = any(keeps) and not target.keeps
        if is_kept or not self.multiplied.isdisjoint(holders):
            return 1.0
        self.multiplied.update(holders)
        for holder in holders:
            self._multiply(holder, ratio)
        return ratio

    # the result

    def finish(self, has_nan: bool) -> Decision:
        """Rounds the numbers, as equal ones are products of others in another order, and reports
        what they are and the RMS of what products computed with them in the last pass. has_nan: of
        that."""
        self._set_siblings()
        numbers = {name: change.number for name, change in self.changes.items()}
        numbers = self._agreed("values", numbers)
        results = agreed(f"{self.name}/results", self.sizes)
        for name, number in numbers.items():
            self._finish_one(name, float(f"{number:.14g}"), results.get(name))
        if has_nan:
            kind = type(self.model).__name__
            raise ValueError(
                f"unit_scale: the output of {kind} has NaN for this batch. The model is as it was"
            )
        return Decision(self.changes, list(self.rows.values()))

    def _finish_one(self, name: str, number: float, result: float | None) -> None:
        change = self.changes[name]
        change.number = number
        values = self.parameters[name]
        if not math.isfinite(number) or is_any(~values.isfinite()):
            raise ValueError(
                f"unit_scale: {name} came out as {number:.3g} times what it was, as the batch "
                "gives values that are not finite. The model is as it was"
            )
        self._tag(name, mup_scale=change.tags.mup_scale * number)
        if change.keeps:
            if change.tags.mup_divisor:
                self._tag(name, mup_divisor=change.tags.mup_scale)
            return
        is_kept = name in self.kept_biases or not is_any(values)
        if is_kept or not (change.tags.mup_divisor or number != 1.0):
            return
        why = f"multiplied by {change.start * number:.4g}"
        if result is not None:
            why += f": its result has RMS {result:.3g}"
        if not LOWEST <= number <= HIGHEST:
            why += (
                f"; {number:.3g} times the weight of RMS 1 is outside of 2^-12 to 2^4"
            )
        self._row(name, "scaled", why)

    def _set_siblings(self) -> None:
        """Sets weights that the batch has not reached (an expert) as those of their siblings: the
        same parameter of other items of a list of modules."""
        origins = set(map(self.flow.origin, self.weights.values()))
        read = sorted(filter(None, origins))
        alike = {self._of_any_item(name): self.changes[name] for name in read}
        for name in self.classes.kept - origins:
            known = alike.get(self._of_any_item(name))
            if known is not None:
                size = rms_of(self.plain[name])
                tags = known.tags._replace(mup_divisor=size)
                self.changes[name] = Change(tags, 1 / size, number=known.number)
                self._write(name)

    def _of_any_item(self, name: str) -> tuple[str, torch.Size]:
        """The name of a parameter without the numbers of items in lists, and its shape."""
        return re.sub(r"\.\d+\.", "..", name), self.plain[name].shape


class _Cell(NamedTuple):
    """A recurrent layer. size: its hidden state over torch's."""

    size: float
    gates: int


_CELLS = {
    "lstm": _Cell(LSTM_FACTOR, 4),
    "gru": _Cell(GRU_FACTOR, 3),
    "rnn_tanh": _Cell(TANH_FACTOR, 1),
    "rnn_relu": _Cell(RELU_FACTOR, 1),
}


def _off_one(tensor: Tensor) -> float:
    """The RMS of an operand on the `GRID`, 1 within `REACH`."""
    size = rms_of(tensor)
    if abs(math.log2(size)) > REACH:
        return _rounded(size)
    return 1.0


def _rounded(size: float) -> float:
    steps = round(math.log2(size) / GRID)
    return float(2.0 ** (steps * GRID))


def _nearest_power(rms: float) -> float:
    """The power of two next to an RMS, at most 32 octaves from 1."""
    octaves = round(math.log2(rms))
    return 2.0 ** min(max(octaves, -32), 32)
