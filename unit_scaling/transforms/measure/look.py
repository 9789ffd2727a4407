"""Makes a plan: records one copy of the model, then measures a second one.

The copies share the model's parameters, have their own buffers and no hooks. What they write into
parameters is undone, and random states are restored.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fp8.casts.measuring import uncast
from fp8.common.report import LEFT_ALONE
from fp8.common.step import detached, plain, restored, seeded, tensors_within
from fp8.common.threads import Setting, Stack, apart

from ...parameter import restore_own_tags
from ..capture.copies import twin_of
from ..capture.forms import Form
from ..capture.record import CallNode, Key, Place, Recorder, tensors_in
from ..capture.structure import Structure, held_by
from ..folding.ratios import find_ties
from ..plan.actions import Arriving, CallRow, Plan, Settings, Settled, Step, Weights
from ..plan.arguments import find_shares, joined
from ..plan.planner import Planned, make_plan
from ..plan.weights import parametrizations, pruned, tagged_weights
from ..run.border import records
from ..run.install import Call, Given, Places, Scope, find_scope, is_flattened, is_sharded
from ..run.varying import Following
from .gauge import note_places, place, with_true_gradients
from .measuring import Actual, Measured, Measuring, backward
from .ranks import agreed_once, fingerprint, numbered

RUNNING = Stack()
"""The scopes that are running in this thread, innermost last; in practice at most one."""

UNSEEN = "unit_scale has not seen this form of call yet"


class Looking(Scope, Protocol):
    """The part of `run.scope.UnitScale` that recording and measuring use."""

    kinds: dict[Callable[..., Any], str]
    replacements: dict[Callable[..., Any], Callable[..., Any]]
    settled: Settled
    plans: dict[Form, Plan]
    structure: Structure
    init: str
    residual: str
    context_length: int | None
    arriving: dict[bool, Arriving]
    name: str

    def settle(self, training: bool = False) -> None: ...
    def within(self, path: str, call: Call) -> Any: ...
    def forget_loose(self, plan: Plan) -> None: ...


def _without_warnings() -> AbstractContextManager[Any]:
    quiet = warnings.catch_warnings()
    quiet.__enter__()
    warnings.simplefilter("ignore")
    return quiet


# Suppresses warnings while recording; they are shown when the model runs. Filters are per process.
_SILENT = Setting(_without_warnings)


def its_parameter(model: nn.Module, name: str) -> nn.Parameter:
    """The parameter of that name, whose tags the first call changes. Raises RuntimeError if a
    tensor stands in its place."""
    try:
        return model.get_parameter(name)
    except AttributeError:
        raise RuntimeError(
            f"{UNSEEN}: call the model once before torch.func.functional_call, which replaces its "
            "parameters"
        ) from None


@dataclass(frozen=True)
class Look:
    """A look at a call of ``module``, which is at ``path`` in the model of ``scope``. given: the
    arguments. hooks: as in `Form`. evaluate: run the copies in evaluation mode. actual:
    measurements from a step of the model itself."""

    scope: Looking
    module: nn.Module
    path: str
    given: Given
    hooks: Collection[str] = ()
    evaluate: bool = False
    actual: Actual | None = None

    def plan(self) -> Plan:
        """Returns the plan for the call. Raises RuntimeError for a model sharded by FSDP2 or
        parallelize_module, which cannot be copied, and TypeError for arguments without values, of
        `torch.fx.symbolic_trace`."""
        _check_seen(self.module, self.given)
        twin = self._twin()
        if not self.scope.name:
            names = sorted(name for name, _ in twin.named_parameters())
            self.scope.name = numbered(fingerprint(names))
        weights = tagged_weights(twin, self.path)
        with apart():
            with torch.inference_mode(False), torch.enable_grad():  # which show autograd functions
                recorder = self._record(twin, weights)
                if unseen := _unseen(recorder.nodes) & weights.factors.keys():
                    weights, twin = replace(weights, unseen=frozenset(unseen)), self._twin()
                    recorder = self._record(twin, weights)
            around = any(node.around for node in recorder.nodes)
            while True:
                planned = self._decide(recorder, weights)
                with torch.set_grad_enabled(around or torch.is_grad_enabled()):
                    found = self._measure(planned)
                if not (around and _is_hidden(recorder.nodes, found.again)):
                    break
        _end(planned, recorder, found)
        if not self.path and self.scope.init == "unit":
            buffers = {id(b): name for name, b in twin.named_buffers()}
            results = list(recorder.results.values())
            planned.plan.ties = find_ties(recorder.nodes, planned.plan, buffers, results)
        return planned.plan

    def _twin(self, leaf: Callable[[Tensor], Tensor] | None = None) -> nn.Module:
        """A copy that shares its parameters, or has what ``leaf`` returns for them."""
        twin = twin_of(self.module, self.scope, _Recorded(self.scope), leaf or _itself)
        vars(twin).pop("forward", None)  # what is set on the instance has called the class's
        restore_own_tags(twin)
        return twin.eval() if self.evaluate else twin

    def _decide(self, recorder: Recorder, weights: Weights) -> Planned:
        """Makes a plan with what the first process of the job has settled: all processes compute
        one function, whatever the values and lengths of their batches."""
        scope, settled = self.scope, self.scope.settled
        settings = Settings(
            weights=weights,
            replaced=frozenset(scope.kinds[f] for f in scope.replacements),
            preserve=scope.init == "preserve",
            residual=scope.residual,
            context=scope.context_length,
            settled=settled,
            whole=not self.path,
        )

        def made() -> Planned:
            return with_true_gradients(make_plan(recorder.nodes, settings), settled)

        before = settled.fixed()
        self._settle_shares(recorder, weights)
        planned = made()
        new = {key: value for key, value in settled.fixed().items() if key not in before}
        changed = settled.fix(agreed_once(f"{scope.name}/settled", new))
        return made() if changed else planned

    def _settle_shares(self, recorder: Recorder, weights: Weights) -> None:
        """Runs a copy with the original values of parameters, if calls join values and parameters,
        and settles the factors of their terms."""
        nodes, known = recorder.nodes, self.scope.settled.shares
        joins = {node.key for node in nodes if joined(node, nodes, weights.factors)}
        if self.scope.init == "preserve" or joins <= known.keys():
            return
        with torch.no_grad():
            original = self._record(self._twin(), weights, original=True)
        known |= find_shares(original.nodes, weights.factors) | known

    def _record(self, twin: nn.Module, weights: Weights, original: bool = False) -> Recorder:
        """Runs a copy. original: as in `Recorder`.

        A loss outside the model may read what is *kept*: tensors among the attributes of its
        modules, in its arguments, in objects within its result, and those that hooks have seen.
        """
        scope, path = self.scope, self.path
        (args, kwargs), copies = detached(self.given, records=False)
        inputs = {id(copies[id(t)]): t.requires_grad for _, t in tensors_in(self.given)}
        wanted = [id(copies[id(t)]) for t in tensors_within(self.given) if t.requires_grad]
        entering = [key for key in wanted if key not in inputs]
        running, computing = scope.path.items, parametrizations(twin, path)
        path_now = lambda: running[-1] if running else path  # noqa: E731
        in_pairs = scope.init != "preserve"  # torch may choose another order
        rest = (inputs, entering, path_now, computing, original, in_pairs)
        factors = weights.factors if original else weights.restored
        recorder = Recorder(scope.kinds, _names(twin, path), factors, *rest)
        seen: list[Any] = []
        for module in map(twin.get_submodule, self.hooks):
            module.register_forward_hook(lambda _, *rest: seen.append(rest), with_kwargs=True)
        with _unchanged(twin), _SILENT, uncast():
            result = run_in(scope, recorder, path, lambda: twin(*args, **kwargs))
        ends = plain(result)
        within = list(tensors_within(ends))
        inner = Counter(map(id, within)) - Counter(id(t) for _, t in tensors_in(ends))
        others = [t for t in within if id(t) in inner]
        kept = held_by(twin, path) | {"": [*others, *tensors_within([args, kwargs, seen])]}
        recorder.results, recorder.kept = recorder.nodes_of(ends), recorder.nodes_of(kept)
        return recorder

    def _measure(self, planned: Planned) -> Measured:
        """Measures corrections and gauges for a plan and completes it."""
        scope, path, actual = self.scope, self.path, self.actual
        training = self.module.training and not self.evaluate
        scope.settle(training and records())
        plan, known = planned.plan, scope.settled.corrections
        plan.name = fingerprint(scope.name, path, training, actual is None)
        places = Counter(planned.flow.nodes[i].place for i in planned.checked)
        shared = any(number > 1 and place not in known for place, number in places.items())
        if planned.settled or shared:
            # The factors first: those of another length, or one for all iterations of a loop.
            first, _ = self._step(planned, known, first=True)
            known = first.finish({}).corrections
        mode, failed = self._step(planned, known)
        settled = self._share_arriving(plan)
        found = mode.finish({} if actual is None else actual.gradients).shared(plan.name)
        place(planned, found, settled, scope.init == "preserve", scope.name)
        plan.true = settled.twice
        failed = "they are differentiated" if plan.true else failed
        if failed:
            why = f"gradients as they are: {failed}"
            plan.rows.append(CallRow(path, "backward", LEFT_ALONE, why))
        if not path:
            scope.forget_loose(plan)
        return found

    def _step(
        self, planned: Planned, known: Mapping[Place, int], first: bool = False
    ) -> tuple[Measuring, str]:
        """Runs a copy forward and, if gradients are recorded, backward. Returns (measurements, why
        the backward pass failed). known: corrections measured before. first: whether the step is
        for the factors alone."""
        scope, settled, following = self.scope, self.scope.settled, None
        twin = self._twin(_with_gradient if records() else Tensor.detach)
        if settled.varying:
            note_places(planned, (), [0] * len(planned.flow.nodes))
            preserves = scope.init == "preserve"
            following = Following(planned.plan, settled, scope.structure, preserves)
        rest = (scope.kinds, scope.replacements, scope.path.items, following)
        mode = Measuring(planned, known, first and bool(planned.settled), *rest)
        find_scope(twin, _Recorded).measuring = mode
        loss = None if first or self.actual is None else self.actual.loss
        parameters, failed = _parameters(twin, self.path), ""
        with _unchanged(twin), _SILENT, uncast():
            (args, kwargs), _ = detached(self.given, records())
            output = run_in(scope, mode, self.path, lambda: twin(*args, **kwargs))
            try:
                planned.plan.final = records() and backward(mode.found, output, parameters, loss)
            except RuntimeError as error:  # as in that of the model itself
                failed = str(error).splitlines()[0]
        mode.check(settled.varying)
        return mode, failed

    def _share_arriving(self, plan: Plan) -> Settled:
        """Sets what arrives at the results of a plan, in one cell for all plans that may run in one
        step. Returns what is settled for it, with the parameters of these."""
        scope, settled = self.scope, self.scope.settled
        if self.actual is not None:
            outside = 0 if settled.twice else self.actual.outside
            plan.final, plan.arriving = True, Arriving(outside)
        elif scope.init == "preserve" or settled.twice:
            plan.arriving = Arriving(0)  # gradients of parameters are the true ones
        else:
            plan.arriving = scope.arriving.setdefault(plan.final, plan.arriving)
        if settled.parameters and plan.outside is None:  # their exponents hold for the first ones
            plan.arriving = scope.arriving[plan.final] = Arriving(0)
        if plan.outside is None:  # it may run in one step with others of which it is not known
            for each in scope.plans.values():
                if each is not plan and each.arriving is plan.arriving:
                    settled = replace(settled, parameters=each.measured | settled.parameters)
        return settled


def _itself(parameter: Tensor) -> Tensor:
    """A parameter, without the computation that `torch.func.functional_call` may have put there."""
    return parameter if parameter.grad_fn is None else _with_gradient(parameter)


def _with_gradient(parameter: Tensor) -> Tensor:
    leaf = parameter.detach()
    return leaf.requires_grad_() if parameter.requires_grad else leaf


def _parameters(twin: nn.Module, path: str) -> dict[str, Tensor]:
    """The parameters of a copy by name."""
    for child in twin.modules():  # which lacks the hooks that prune
        for original, name in pruned(child).items():
            setattr(child, name, getattr(child, original) * getattr(child, f"{name}_mask"))
    return dict(twin.named_parameters(prefix=path))


def _check_seen(module: nn.Module, given: Given) -> None:
    """Raises TypeError for arguments of `torch.fx.symbolic_trace`, and RuntimeError for a sharded
    model."""
    if any(isinstance(value, torch.fx.Proxy) for value in (*given[0], *given[1].values())):
        raise TypeError(
            "torch.fx.symbolic_trace cannot trace a unit-scaled model, whose factors are no calls "
            "of its modules: trace it before unit_scale, or take torch.export"
        )
    if is_flattened(module):
        raise RuntimeError(
            f"{UNSEEN}, and cannot look at a {type(module).__name__} in FullyShardedDataParallel: "
            "use fully_shard, or wrap the whole model alone, with use_orig_params=True, after a "
            "call of the same form"
        )
    if is_sharded(module):
        raise RuntimeError(
            f"{UNSEEN}, and cannot look at a sharded {type(module).__name__}: call the model "
            "once before fully_shard or parallelize_module, after other changes of its modules, "
            "with arguments of the same form (a batch of one is another), in the same mode, and "
            "with gradients if they are taken"
        )


def _unseen(nodes: list[CallNode]) -> set[str]:
    """The parameters of which calls that no replay sees compute weights."""
    calls = [n for n in nodes if n.function and n.computed and n.key is None and not n.written]
    origins = {nodes[i.node].origin for n in calls if not n.inside for i in n.inputs}
    return {name for name in origins if name is not None}


def _is_hidden(nodes: Iterable[CallNode], again: Collection[str]) -> bool:
    """Whether an autograd function calls modules that its backward pass does not run ``again``, but
    computes their gradients itself: marks their calls as its own."""
    found = False
    for node in nodes:
        runs_again = any(f"{node.path}.".startswith(f"{path}.") for path in again)
        if node.around and not node.inside and not runs_again:
            node.inside, found = node.around, True
    return found


def run_in(scope: Looking, mode: TorchFunctionMode, path: str, call: Call) -> Any:
    """Runs ``call()``, the forward of the module at ``path`` or of a copy of it, under a mode."""
    RUNNING.items.append(scope)
    try:
        with mode:
            return scope.within(path, call)
    finally:
        RUNNING.items.pop()


@contextmanager
def _unchanged(twin: nn.Module) -> Iterator[None]:
    """Restores random states, and the parameters, which ``twin`` shares with its model."""
    devices = sorted({p.device.index or 0 for p in twin.parameters() if p.is_cuda})
    with seeded(None, devices), restored(twin.parameters()):
        yield


def _names(model: nn.Module, path: str) -> dict[int, str]:
    """Names of parameters and of pruned weights, by id."""
    names = {id(p): name for name, p in model.named_parameters(prefix=path)}
    for name, child in model.named_modules(prefix=path):
        masked = {id(getattr(child, n)): p for p, n in pruned(child).items()}
        names |= {key: f"{name}.{p}" if name else p for key, p in masked.items()}
    return names


class _Recorded:
    """The scope of a copy, in place of the model's while it is recorded and measured."""

    order = 0

    def __init__(self, scope: Looking) -> None:
        self.scope = scope
        self.path = scope.path
        #: The measuring mode, used in the backward pass too.
        self.measuring: Measuring | None = None

    def inside(self, path: str) -> Places | None:
        """As the scope's. Raises RuntimeError in a thread started by the forward pass: its calls
        are not in the plan, and it would deadlock with the recording."""
        if RUNNING.items:
            return self.scope.inside(path)
        if self.measuring is not None:
            return None  # recomputed by a checkpoint
        raise RuntimeError(
            f"unit_scale: {path!r} runs in another thread than the forward pass that it is part "
            "of; a plan belongs to one thread: transform the parts, each by itself"
        )

    def run(self, call: Call, module: nn.Module, path: str, given: Given) -> Any:
        """As the scope's; raises as `inside`."""
        if self.inside(path) is not None or self.measuring is None:
            return self.scope.run(call, module, path, given)
        self.measuring.found.again[path] = True
        return run_in(self.scope, self.measuring.again(), path, call)


def _end(planned: Planned, recorder: Recorder, found: Measured) -> None:
    """Writes the gauges and sizes of the model's results and of what is kept into a plan. The size
    of a result that calls read too is that of what arrives from outside."""
    plan, flow, sizes = planned.plan, planned.flow, found.gradients
    ends, kept = recorder.results, recorder.kept
    outside = _keep(planned, kept.values(), sizes)
    read = {i.node for node in flow.nodes if node.live and node.function for i in node.inputs}
    held = {slot: node for slot, node in kept.items() if slot[0]}
    plan.kept = tuple(dict.fromkeys(slot[:2] for slot in held))
    for slot, index in {**ends, **held}.items():
        node = flow.nodes[index]
        if slot in held and (index in outside or index in read):
            continue
        size = 0.0 if node.key is None else sizes.get(node.key, 0.0)
        size = found.arriving.get(slot, size) if index in read else size
        plan.ends[slot] = planned.exponents[index], size
        if index in outside:
            continue
        single = sum(other == index for other in ends.values()) == 1 and node.results == 1
        if node.key is None or index in read or not single:
            plan.outputs[slot] = planned.exponents[index], size
        else:
            step = plan.step_of(node) or Step()
            plan.steps[node.key] = replace(step, end=(planned.exponents[index], size))


def _keep(planned: Planned, kept: Collection[int], sizes: Mapping[Key, float]) -> set[int]:
    """Gives tensors that are kept the gauge 0 of gradients from outside, between the call that
    computes them and those that read them; those that an object among the arguments holds, too.
    Returns the nodes of those that calls with steps compute and read."""
    plan, nodes = planned.plan, planned.flow.nodes
    edges = [(node.key, i) for node in nodes if node.live and node.function for i in node.inputs]
    other = {i.node for key, i in edges if key is None}
    other |= {index for index, node in enumerate(nodes) if node.around}  # no gradient comes from it
    found = {i: key for i in kept if nodes[i].live and (key := nodes[i].key) and i not in other}
    calls = {key: sizes.get(key, 0.0) for key in found.values()}
    for index, key in found.items():
        end = planned.exponents[index], calls[key]
        plan.steps[key] = replace(plan.steps.get(key) or Step(), end=end)
    for reader, i in edges:
        if reader is not None and (i.node in found or nodes[i.node].within):
            step = plan.steps.get(reader) or Step()
            start = i.slot, planned.exponents[i.node]
            plan.steps[reader] = replace(step, starts=(*step.starts, start))
    plan.calls = {key: replace(c, kept=calls.get(key)) for key, c in plan.calls.items()}
    plan.places = {at: replace(c, kept=calls.get(c.key)) for at, c in plan.places.items()}
    return set(found)
