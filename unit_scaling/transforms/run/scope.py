"""The scope of unit scaling: the plans of a transformed model and how calls use them."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fp8.common.pitfalls import PitfallWarning, warn_once
from fp8.common.threads import Stack, in_backward, in_recomputation, in_shape_inference
from fp8.modes.autocast import outside_compiler

from ...parameter import has_parameter_data, remember_tags, tag
from ..capture.copies import Beginning, Example, example_of, hooked, remade
from ..capture.forms import Form, described, form_of, without_shapes
from ..capture.kinds import KINDS
from ..capture.record import tensors_in
from ..capture.structure import (
    Structure,
    check_kept,
    part,
    structure_of,
    survivors,
    warn_of_new_weights,
)
from ..capture.values import has_values
from ..folding.solve import Folded, folded
from ..measure.look import RUNNING, UNSEEN, Look, its_parameter, run_in
from ..measure.measuring import Actual, Watching, sizes
from ..plan.actions import MEASURED, Arriving, CallRow, Plan, Settled
from ..plan.model_plan import ModelPlan, check_fits, retag, tags_in
from .border import entering, holds, leaving, records, returns_other
from .install import (
    Call,
    Given,
    Places,
    find_scope,
    install,
    is_exported,
    is_sharded,
    warn_of_break,
)
from .replay import PlanMissError, Replay
from .varying import ON_ITS_OWN, REENTRANT, VARIES, Following

Replacements = dict[Callable[..., Any], Callable[..., Any]]

LOOKS = 8
"""The number of steps watched for initially zero gradients. Those of zero weights appear after one
optimizer step, of two zero weights in sequence after two. A call of so many that makes other calls
than planned starts again with the attributes, parameters and buffers that it found.
"""


@dataclass(eq=False, repr=False)
class UnitScale:
    """The scope of unit scaling: the plans of a model, one for each call signature. edition: an
    identifier of the structure; compiled code guards on it. arriving: `Plan.final` -> what arrives
    at the plans of that kind. name: of the model, in the agreements of processes."""

    order = 0

    rows: list[CallRow]
    replacements: Replacements
    init: str
    residual: str
    context_length: int | None
    strict: bool = False
    settled: Settled = field(default_factory=Settled)
    plans: dict[Form, Plan] = field(default_factory=dict)
    structure: Structure = field(default_factory=dict)
    edition: str = "0"
    path: Stack = field(default_factory=Stack)
    arriving: dict[bool, Arriving] = field(default_factory=dict)
    name: str = ""
    _latest: dict[bool, Plan] = field(default_factory=dict)
    _missed: frozenset[str] = frozenset()
    _runs: Counter[Form] = field(default_factory=Counter)
    _held: Any = None
    _example: Example | None = None

    def __post_init__(self) -> None:
        self.kinds = KINDS | {f: f"replace {i}" for i, f in enumerate(self.replacements)}
        self._recording = threading.RLock()

    @property
    def unit_scaled(self) -> bool:
        """Whether weights, activations and gradients have RMS 1; not so with init="preserve"."""
        return self.init == "unit"

    def __getstate__(self) -> dict[str, Any]:
        fresh: dict[str, Any] = {"kinds": None, "_recording": None, "_example": None}
        return self.__dict__ | fresh | {"_runs": Counter()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.__post_init__()

    def without_plans(self) -> UnitScale:
        """The same transform for another model, without plans."""
        options = (self.init, self.residual, self.context_length, self.strict)
        return UnitScale([], self.replacements, *options)

    def inside(self, path: str) -> Places | None:
        """The name in the scope that is running: a submodule with a transform of its own is part of
        the plan of the whole model."""
        if not RUNNING.items:
            return None
        outer = RUNNING.items[-1]
        names = outer.path.items
        return ((names, path if outer is self else f"{names[-1]} > {path}"),)

    def run(self, call: Call, module: Any, path: str, given: Given) -> Any:
        """Returns ``call()`` under the plan for this call signature, which its first call makes."""
        for _, name in self.inside(path) or ():
            return RUNNING.items[-1].within(name, call)
        # Per thread: `is_compiling` is true in all threads while one compiles (torch 2.13).
        # Repeated inline, because a helper function would be compiled itself, to True.
        compiling = torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting()
        changed = bool(self.edition) and module._asks(id(self), id(module), "has_changed")
        if changed and not compiling:
            with self._recording:
                self.follow(module, path)
        traced = torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting()
        # In training, gradients are measured even under `torch.no_grad`, for warm-up calls.
        wanted = module.training or torch.is_grad_enabled()
        grads = wanted if traced else records(wanted)
        hooks = module._asks(id(self), id(module), "hooks") if grads else ()
        args, kwargs = form_of(given)
        form = Form(path, module.training, args, kwargs, grads, hooks)
        plan = self._known(form)
        if compiling:
            if plan is not None and not changed and not self._is_followed(plan, form, module):
                return self._replay(plan, call, module, given, form)
            if is_exported():
                seen = plan is not None and not changed
                raise RuntimeError(
                    VARIES if seen else f"{UNSEEN}: call the model once before torch.export"
                )
            from .graph_break import outside_graph

            return outside_graph(lambda: self._beside_graph(call, module, path, given))
        return outside_compiler(lambda: self._eager(form, call, module, given))

    def _beside_graph(self, call: Call, module: Any, path: str, given: Given) -> Any:
        """As `run`, for a call that torch.compile leaves out of its graph."""
        if self.settled.varying:
            warn_once(PitfallWarning, VARIES, about=module, key="varying")
        elif path and self._latest:
            warn_once(PitfallWarning, ON_ITS_OWN.format(path), about=module, key=path)
        return self.run(call, module, path, given)

    def settle(self, training: bool = False) -> None:
        """Adopts what the plans so far have measured. training: another plan will share the gauges
        of their parameters, so these are final."""
        for known in list(self.plans.values()):
            if training and known.final and known.outside is None:
                known.arriving.exponent = 0
            self.settled.settle(known)
            self.arriving.setdefault(known.final, known.arriving)

    def has_changed(self, module: nn.Module, path: str) -> bool:
        """Whether ``module``, at ``path``, has changed since the scope was installed."""
        return structure_of(module, self, path) != part(self.structure, path)

    def hooks(self, module: nn.Module, path: str = "") -> tuple[str, ...]:
        """As `hooked`; none for a sharded model, which cannot be recorded again."""
        found = hooked(module)
        return () if found and is_sharded(module) else found

    def follow(self, module: nn.Module, path: str = "") -> None:
        """Adopts the structure of ``module``, at ``path``: new submodules get the scope, and all
        plans are dropped. Factors of the calls of other submodules stay. Raises ValueError for a
        submodule with init="unit" in a model with init="preserve", and RuntimeError if plain
        tensors have taken the place of parameters."""
        for name, child in module.named_modules(prefix=path):
            other = find_scope(child, UnitScale)
            if other is not None and other.init == "unit" and self.init == "preserve":
                raise ValueError(
                    f"{name or 'the model'} was unit-scaled with init='unit', and the model around "
                    "it with init='preserve', which has no factors: use one init for both"
                )
        check_kept(module, self.structure, path)
        if self.structure and self.unit_scaled:
            warn_of_new_weights(module, self)
        gone = part(self.structure, path)
        kept = {name: entry for name, entry in self.structure.items() if name not in gone}
        now = kept | structure_of(module, self, path) if self.structure else {}
        paths = survivors(self.structure, now)
        install(module, self, path)
        self.structure = kept | structure_of(module, self, path)
        self.settle()
        self.settled = self.settled.moved(paths)
        self._forget()

    def _forget(self) -> None:
        """Drops all plans."""
        self.plans, self._latest, self.arriving = {}, {}, {}
        self._held = None
        self._runs.clear()
        self.edition = str(int(self.edition) + 1)

    def _known(self, form: Form) -> Plan | None:
        """The plan for a call signature; for a submodule also the latest one of the whole model
        that calls it."""
        plan = self.plans.get(form)
        if plan is None and not form.grads:  # without gradients, as with them
            plan = self.plans.get(form._replace(grads=True))
        if plan is None and form.path:
            whole = [p for f, p in self.plans.items() if f[:2] == ("", form.training)]
            whole.sort(key=lambda p: p is not self._latest.get(form.training))
            return next((p for p in whole if p.covers(form.path)), None)
        if plan is not None and not form.path:
            self._latest[form.training] = plan
        return plan

    def _eager(self, form: Form, call: Call, module: nn.Module, given: Given) -> Any:
        warn_of_break(module)
        if form.path and in_backward():
            return self._again(form, call)
        if in_shape_inference():
            return call()
        if not self.settled.twice and any(plan.true for plan in list(self.plans.values())):
            self.settle()
            self.settled.differentiate()
            self._forget()
        stale, made = None, None
        early, self._runs[form] = self._runs[form] < LOOKS, self._runs[form] + 1
        start = Beginning(given, module if early else None)
        known = self.plans.get(form)
        if known is not None and known.watched and not in_recomputation():
            with self._recording:
                self._look_again(form, module, given)
        while True:
            plan = self._known(form)
            if plan is None or plan is stale:
                with self._recording:
                    if self._known(form) is not plan:
                        continue  # another thread has made the plan
                    made = plan = self._first(form, module, given)
            try:
                return self._replay(plan, call, module, given, form, start)
            except PlanMissError as miss:
                start.restore()
                if plan is made and miss.paths <= self.settled.varying.keys():
                    raise
                stale = None if self._vary(miss.paths, certain=plan is made) else plan

    def _again(self, form: Form, call: Call) -> Any:
        """Runs a part of the model again in its backward pass, whose gradients have the gauges of
        the plan: the border of the model is elsewhere."""
        plan = self._known(form)
        if plan is None or (self.settled.varying and not in_recomputation()):
            raise RuntimeError(REENTRANT)
        following = None
        if in_recomputation():  # at the same places
            following = Following(plan, self.settled, self.structure, not self.unit_scaled)
        mode = Replay(plan, self.kinds, self.replacements, self.path.items, following)
        return run_in(self, mode, form.path, call)

    def _is_followed(self, plan: Plan, form: Form, module: nn.Module) -> bool:
        """Whether the gauges of tensors are tracked: if calls depend on values, and in training if
        the model holds a tensor of an earlier run, and for a submodule that is called on its own
        under the plan of the whole model, which knows the gradients at the border of that only."""
        if self.settled.varying or not form.grads or is_exported():
            return bool(self.settled.varying)
        alone = bool(form.path) and plan is not self.plans.get(form)
        return holds(module, form.path, plan) or alone

    def _vary(self, paths: frozenset[str], certain: bool) -> bool:
        """Notes that modules have made other calls than planned. Returns whether their calls are
        now taken to depend on values: those of which this is ``certain``, and at the second time.
        """
        varying = self.settled.varying
        known, missed, self._missed = set(varying), self._missed, self._missed | paths
        varying |= {path: True for path in sorted(paths) if certain or path in missed}
        return not paths <= known and paths <= varying.keys()

    def _look(self, *given: Any, **options: Any) -> Plan:
        """The plan of a `Look`; of another one if calls turn out to depend on values."""
        while True:
            try:
                return Look(self, *given, **options).plan()
            except PlanMissError as miss:  # the measured copy differs from the recorded one
                if not self._vary(miss.paths, certain=True):
                    raise

    def _look_again(self, form: Form, module: nn.Module, given: Given) -> None:
        """Makes a plan again after a step of the model itself has measured gradients that the first
        plan lacked: those of a loss outside the model, and those that were zero."""
        plan = self.plans[form]
        found, plan.watched = sizes(plan.watched), {}
        plan.looks = LOOKS if found and is_sharded(module) else plan.looks + bool(found)
        if not found or plan.looks == LOOKS:
            return
        outside, later = (0, plan.outside) if plan.final else (plan.outside or 0, 0)
        if plan.final and found.keys().isdisjoint(plan.unseen):
            return
        true = {key: size - plan.gauges[key] - outside for key, size in found.items()}
        self.settled.settle(plan)
        again: dict[str, Any] = {"hooks": form.hooks, "actual": Actual(true, later)}
        with torch.set_grad_enabled(form.grads):
            refined = self._look(module, form.path, given, **again)
        refined.looks = plan.looks
        self._use(form, refined)

    def _mode(self, plan: Plan, form: Form, following: Following | None, traced: bool) -> Replay:
        """The mode that executes a plan; it measures gradients if the plan still lacks some."""
        rest = (self.kinds, self.replacements, self.path.items, following)
        shows = plan.looks < LOOKS and (not plan.final or bool(plan.unseen))
        shows = shows and form.grads and not form.path and plan is self.plans.get(form)
        if traced or not shows or in_recomputation():  # which receives no gradient
            return Replay(plan, *rest)
        watch = Watching(plan, plan.gauges.keys(), *rest)
        plan.watched = watch.norms
        return watch

    def within(self, path: str, call: Call) -> Any:
        """Runs ``call()``, the forward of the module at ``path``."""
        self.path.items.append(path)
        try:
            return call()
        finally:
            self.path.items.pop()

    def _replay(
        self,
        plan: Plan,
        call: Call,
        module: Any,
        given: Any,
        form: Form,
        start: Beginning | None = None,
    ) -> Any:
        eager = start is not None
        traced = torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting()
        if not (eager or traced):  # a graph break has left this frame to eager mode
            return outside_compiler(lambda: self._eager(form, call, module, given))
        # Not a with statement: a graph break inside one is resumed in pieces, each compiled while
        # the mode is active. Inside try, a graph break leaves the whole frame to eager mode.
        entered = entering(given, plan)
        following = None if traced else self._following(plan, module, form, entered)
        mode = self._mode(plan, form, following, traced)
        mode.writes = None if start is None else start.writes
        RUNNING.items.append(self)
        if traced:
            module._tracing(True)
        mode.__enter__()
        try:
            output = self.within(form.path, lambda: call(entered))
        finally:
            mode.__exit__(None, None, None)
            RUNNING.items.pop()
        made = id(plan), tuple(mode.counts.items())
        if traced:
            module._tracing(False)
        other = [form.path] if following is None and returns_other(output, plan) else []
        if eager and not in_recomputation():
            mode.check(self.settled.varying, other)
        elif traced and (other or module._asks(id(self), id(module), "other_paths", *made)):
            if is_exported():
                raise RuntimeError(VARIES)
            from .graph_break import with_other_calls

            module._tracing(True)  # the graph is not used
            return with_other_calls(lambda: self._eager(form, call, module, given))
        return leaving(output, plan, module, form.path, following)

    def other_paths(self, module: nn.Module, path: str, plan: int, made: Any) -> tuple[str, ...]:
        """`Plan.other_paths` of the plan with this ``id``. made: as items."""
        found = next(known for known in self.plans.values() if id(known) == plan)
        return tuple(found.other_paths(dict(made)))

    def _following(self, plan: Plan, module: Any, form: Form, given: Any) -> Following | None:
        """Finds steps and tracks gauges, from those of ``given``, the arguments."""
        if not self._is_followed(plan, form, module):
            return None
        names = {id(p): name for name, p in module.named_parameters(prefix=form.path)}
        about = (self.structure, not self.unit_scaled, names, self.settle, self.name)
        following = Following(plan, self.settled, *about)
        following.begin(given)
        return following

    def _first(self, form: Form, module: nn.Module, given: Given) -> Plan:
        """Records the model and makes the plan for this call signature."""
        if not has_values(t for _, t in (*tensors_in(given), *module.named_parameters())):
            return self._mapped(form, given)
        with torch.set_grad_enabled(form.grads):
            plan = self._look(module, form.path, given, hooks=form.hooks)
        if not form.path:
            with contextlib.suppress(TypeError):
                self._example = example_of(given)
            self._demote(module, plan.inner)
            self._deepen(module, plan.depths)
            remember_tags(module)
        for row in (*self.rows, *plan.rows) if self.strict else ():
            if row.left_alone or row.done == MEASURED:
                raise ValueError(
                    f"unit_scale(strict=True): {row.call} in {row.path or 'the model itself'!r} "
                    f"has no rule: {row.why}"
                )
        self._use(form, plan)
        return plan

    def _use(self, form: Form, plan: Plan) -> None:
        """Makes a plan that of a call signature. Places of other branches keep their steps."""
        if form in self.plans:
            older, newer = plan.in_its_gauge(self.plans[form].places), plan.places
            plan.places = newer | older if self.settled.varying else older | newer
        self.plans[form] = plan
        self._held = None
        if not form.path:
            self._latest[form.training] = plan

    def _mapped(self, form: Form, given: Given) -> Plan:
        """Inside vmap, values are not accessible: uses the plan of a call that differs only in
        dimensions, as a batch differs from its examples."""
        shapeless, plans = without_shapes(form), list(self.plans.items())
        similar = [plan for seen, plan in plans if without_shapes(seen) == shapeless]
        if similar:
            return similar[-1]
        named = ", ".join(described(t) for _, t in tensors_in(given)) or "no tensor"
        mode = "training" if form.training else "evaluation"
        raise RuntimeError(
            f"{UNSEEN}: call the model once before torch.vmap, in {mode} mode and with arguments "
            f"as each example has them: {named}"
        )

    def _demote(self, model: nn.Module, names: frozenset[str]) -> None:
        """Tags as weights the parameters that were taken for the readout before the first call."""
        for name in sorted(names):
            tag(its_parameter(model, name), "weight")
            path, _, leaf = name.rpartition(".")
            why = "not the readout: make the optimizer after the first call"
            self.rows.append(CallRow(path, leaf, "tagged as weight", why))

    def _deepen(self, model: nn.Module, depths: dict[str, int]) -> None:
        """Sets the depth tag of residual branch parameters that have none."""
        counts: Counter[int] = Counter()
        for name, depth in depths.items():
            parameter: Any = its_parameter(model, name)
            if has_parameter_data(parameter) and parameter.mup_scaling_depth is None:
                tag(its_parameter(model, name), parameter.mup_type, depth)
                counts[depth] += 1
        for depth, count in counts.items():
            why = f"depth {depth}, in residual branches: make the optimizer after the first call"
            self.rows.append(CallRow("", f"{count} parameters", "tagged with depth", why))

    def held(self, model: nn.Module) -> str:
        """The plan as JSON, for the state_dict of ``model``; "" if there is none."""
        plans = list(self.plans.values())
        state = [(plan.outside, plan.looks, plan.watched.copy()) for plan in plans]
        if self._held is None or self._held[0] != state:
            known = plans and not self.replacements
            text = self.plan(model, seen=False).to_json() if known else ""
            self._held = state, text
        return str(self._held[1])

    def take_over(self, model: nn.Module, text: str) -> None:
        """Adopts the plan of a checkpoint if it fits ``model``."""
        plan = ModelPlan.from_json(text)
        with contextlib.suppress(ValueError):
            check_fits(model, plan)
            retag(model, plan, rescale=False)
            self.adopt(plan)

    def recalibrate(
        self, module: nn.Module, given: Given, loss: Callable[[Any], Tensor] | None
    ) -> None:
        """Measures the gauges of all calls again; the exponents of parameters are kept."""
        with self._recording, torch.enable_grad():
            self.settle()
            self.settled.gauges, self.settled.operands = {}, {}
            self.plans, self._latest = {}, {}
            actual = None if loss is None else Actual({}, 0, loss)
            hooks = self.hooks(module)
            form = Form("", module.training, form_of(given[0]), form_of(given[1]), True, hooks)
            plan = self._look(module, "", given, hooks=form.hooks, actual=actual)
            self._use(form, plan)

    def plan(self, model: nn.Module, seen: bool = True) -> ModelPlan:
        """The plan as data. Raises ValueError for functions in ``replace`` and, unless ``seen`` is
        False, before the first call."""
        if seen:
            self._check_seen(model)
        if self.replacements:
            raise ValueError("the plan of a model with functions in replace cannot be saved")
        given = (self.init, self.residual, self.context_length, tags_in(model), tuple(self.rows))
        plans, settled = copy.deepcopy((self.plans, self.settled))
        for plan in plans.values() if seen else ():
            plan.watched = {}
        return ModelPlan(*given, plans, settled)

    def adopt(self, plan: ModelPlan) -> None:
        """Adopts a plan and its options instead of recording the model."""
        self.residual, self.context_length = plan.residual, plan.context_length
        self.rows = list(plan.rows)
        self.plans, self.settled = copy.deepcopy((plan.plans, plan.settled))
        self.arriving, self._held = {}, None
        self._latest = {form.training: p for form, p in self.plans.items() if not form.path}

    def _check_seen(self, model: nn.Module) -> None:
        if not any(form.path == "" for form in self.plans):
            raise ValueError(
                f"{type(model).__name__} is unit-scaled and has not run: its factors are found at "
                "its first call, so call it once with an example batch"
            )

    def outside(self, model: nn.Module) -> Folded:
        """The factors that multiply the weights in the plain model with the same function. Raises
        ValueError before the first call, and naming the calls whose factors no weight can absorb.
        """
        if self.init == "preserve":
            if self.replacements:
                raise ValueError("functions in replace of unit_scale cannot be folded into weights")
            return Folded({}, {})
        self._check_seen(model)
        plans = list(self.plans.items())
        seen = [plan for form, plan in plans if form.path == "" and not form.training]
        return folded([tie for plan in seen or [self._evaluated(model)] for tie in plan.ties])

    def _evaluated(self, model: nn.Module) -> Plan:
        """The evaluation plan of a model that has only run in training."""
        if self._example is None:
            raise ValueError(
                f"{type(model).__name__} is unit-scaled and has run in training alone: call it "
                "once in evaluation, with an example batch"
            )
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            given = remade(self._example, device)
        return self._look(model, "", given, evaluate=True)

    def report(self) -> list[CallRow]:
        """The rows of the weights, then of the calls of each plan, without duplicates."""
        calls = [row for plan in list(self.plans.values()) for row in plan.rows]
        return list(dict.fromkeys([*self.rows, *calls]))

    def forget_loose(self, plan: Plan) -> None:
        """Drops plans with fewer measurements than ``plan`` of the whole model: those of
        submodules, and those made without its loss."""
        for form, other in list(self.plans.items()):
            if form.path or (plan.final and not other.final and other.outside is None):
                del self.plans[form]
