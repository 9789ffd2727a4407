"""The scope of unit scaling: what a transformed model does at a call, and its plans."""

from __future__ import annotations

import contextlib
import copy
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from fp8.autocast import outside_compiler
from fp8.threads import Setting, Stack

from ..first_call_checks import check_gradient
from ..parameter import has_parameter_data, remember_tags, tag
from .calls import KINDS
from .copies import Example, detached, example_of, remade, twin_of
from .install import (
    Call,
    Places,
    find_scope,
    install,
    is_exported,
    is_sharded,
)
from .model_plan import ModelPlan, tags_in
from .observe import plain
from .plan import make_plan
from .ratios import find_ties
from .record import Recorder, tensors_in
from .replay import PlanMissError, Replay
from .solve import Folded, folded
from .steps import Plan, Row, Settings, Settled, Weights
from .structure import Structure, has_changed, part, structure_of, warn_of_new_weights
from .weights import parametrizations, pruned, tagged_weights

__all__ = ["Replacements", "UnitScale"]

Replacements = dict[Callable[..., Any], Callable[..., Any]]

# The scopes that are running in this thread, innermost last: at most one, in practice.
_RUNNING = Stack()


def _without_warnings() -> AbstractContextManager[Any]:
    quiet = warnings.catch_warnings()
    quiet.__enter__()
    warnings.simplefilter("ignore")
    return quiet


# While a model is recorded: its warnings come when it runs. Filters belong to the process.
_SILENT = Setting(_without_warnings)

_UNSEEN = "unit_scale has not seen this form of call yet"


class UnitScale:
    """The scope of unit scaling: the plans of a model, one for each form of call."""

    order = 0
    #: Whether a gradient of the model's output was checked.
    gradient_seen = False

    def __init__(
        self,
        rows: list[Row],
        replacements: Replacements,
        *,
        init: str,
        residual: str,
        strict: bool,
        context_length: int | None,
    ) -> None:
        self.rows = rows
        self.replacements = replacements
        self.kinds = KINDS | {f: f"replace {i}" for i, f in enumerate(replacements)}
        self.init = init
        self.residual = residual
        self.strict = strict
        self.context_length = context_length
        self._settled = Settled()
        self.plans: dict[Any, Plan] = {}
        self.structure: Structure = {}
        #: A name for the structure, which compiled code compares.
        self.edition = "0"
        self.path = Stack()
        self._recording = threading.RLock()
        self._latest: dict[bool, Plan] = {}
        self._example: Example | None = None

    @property
    def unit_scaled(self) -> bool:
        """Whether it brings weights, activations and gradients to RMS 1. With init="preserve" they
        are those of the plain model."""
        return self.init == "unit"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "kinds": None, "_recording": None, "_example": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.kinds = KINDS | {f: f"replace {i}" for i, f in enumerate(self.replacements)}
        self._recording = threading.RLock()

    def anew(self) -> UnitScale:
        """The same transform of another model, without plans."""
        settings: dict[str, Any] = {"init": self.init, "residual": self.residual}
        settings |= {"strict": self.strict, "context_length": self.context_length}
        return UnitScale([], self.replacements, **settings)

    def inside(self, path: str) -> Places | None:
        """Its name in the scope that is running: a part with a transform of its own is in the plan
        of the whole.
        """
        if not _RUNNING.items:
            return None
        outer = _RUNNING.items[-1]
        names = outer.path.items
        return ((names, path if outer is self else f"{names[-1]} > {path}"),)

    def run(
        self, call: Call, module: nn.Module, path: str, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """``call()`` under the plan for this form of call, made at its first time."""
        for _, name in self.inside(path) or ():
            return _RUNNING.items[-1].within(name, call)
        # Of this thread: `is_compiling` is true in all threads while one compiles (torch
        # 2.13). Written out at each place: a function of it would be compiled itself, to True.
        compiling = torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting()
        changed = bool(self.edition) and has_changed(module, self, path)
        if changed and not compiling:
            with self._recording:
                self.follow(module, path)
        form = (path, module.training, _form(args), _form(kwargs))
        plan = self._known(form, path, module.training)
        if compiling:
            if plan is not None and not changed:
                return self._replay(plan, call, path)
            if is_exported():
                raise RuntimeError(f"{_UNSEEN}: call the model once before torch.export")
            from .first_call import outside_graph

            return outside_graph(lambda: self.run(call, module, path, args, kwargs))
        output = outside_compiler(lambda: self._eager(form, call, module, path, args, kwargs))
        if self.unit_scaled and not (path or self.gradient_seen):
            self._check_gradient(output)
        return output

    def _check_gradient(self, output: Any) -> None:
        """Has the first gradient of the model's result checked, unless its loss is inside."""
        tensors = [t for _, t in tensors_in(plain(output))]
        if all(t.dim() for t in tensors if t.requires_grad):
            for tensor in tensors:
                check_gradient(self, tensor)

    def follow(self, module: nn.Module, path: str = "") -> None:
        """Takes the structure of ``module``, which is at ``path``, for that of the model: new parts
        get the scope, and plans are made anew.

        Raises ValueError for a part that has the factors of init="unit" in a model without.
        """
        for name, child in module.named_modules(prefix=path):
            other = find_scope(child, UnitScale)
            if other is not None and other.init == "unit" and self.init == "preserve":
                raise ValueError(
                    f"{name or 'the model'} was unit-scaled with init='unit', and the model around "
                    "it with init='preserve', which has no factors: use one init for both"
                )
        if self.structure and self.unit_scaled:
            warn_of_new_weights(module, self)
        install(module, self, path)
        gone = part(self.structure, path)
        kept = {name: entry for name, entry in self.structure.items() if name not in gone}
        self.structure = kept | structure_of(module, self, path)
        self.plans, self._latest, self._settled = {}, {}, Settled()
        self.edition = str(int(self.edition) + 1)

    def _known(self, form: Any, path: str, training: bool) -> Plan | None:
        """The plan for a form of call; for a part, that of the whole if it has run."""
        plan = self.plans.get(form)
        if plan is None and path:
            plan = self._latest.get(training)
            return plan if plan is not None and _covers(plan, path) else None
        if plan is not None and not path:
            self._latest[training] = plan
        return plan

    def _eager(
        self,
        form: Any,
        call: Call,
        module: nn.Module,
        path: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        missed = None
        while True:
            plan = self._known(form, path, module.training)
            if plan is not None and plan is not missed:
                try:
                    return self._replay(plan, call, path)
                except PlanMissError:
                    missed = plan  # it has taken another branch: see it again
            else:
                with self._recording:
                    if self._known(form, path, module.training) is plan:
                        plan = self._first(form, module, path, args, kwargs)
                        break
                # another thread has made a plan meanwhile
        return self._replay(plan, call, path)

    def within(self, path: str, call: Call) -> Any:
        """``call()``, the forward of the module named ``path``."""
        self.path.items.append(path)
        try:
            return call()
        finally:
            self.path.items.pop()

    def _replay(self, plan: Plan, call: Call, path: str, eager: bool = False) -> Any:
        traced = torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting()
        if not (eager or traced):
            return outside_compiler(lambda: self._replay(plan, call, path, eager=True))
        # Not a with statement: a graph break inside one is resumed in pieces, each compiled while
        # the mode is active. Inside try, it leaves this frame, from its start, to eager mode.
        mode = Replay(plan, self.kinds, self.replacements, self.path.items)
        _RUNNING.items.append(self)
        mode.__enter__()
        try:
            return self.within(path, call)
        finally:
            mode.__exit__(None, None, None)
            _RUNNING.items.pop()

    def _first(
        self, form: Any, module: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Plan:
        """Records the model and makes the plan for this form of call."""
        try:
            plan = self.record(module, path, args, kwargs)
        except RuntimeError as error:
            if not str(error).startswith("vmap:"):
                raise
            return self._mapped(form, args, kwargs, error)
        if not path:
            with contextlib.suppress(TypeError):
                self._example = example_of((args, kwargs))
            self._demote(module, plan.inner)
            self._deepen(module, plan.depths)
            remember_tags(module)
        if self.strict:
            alone = [row for row in (*self.rows, *plan.rows) if row.left_alone]
            if alone:
                row = alone[0]
                raise ValueError(
                    f"unit_scale(strict=True): {row.call} in {row.path or 'the model itself'!r} "
                    f"is left alone: {row.why}"
                )
        self.plans[form] = plan
        if not path:
            self._latest[module.training] = plan
        return plan

    def _mapped(self, form: Any, args: Any, kwargs: Any, error: Exception) -> Plan:
        """Under vmap, whose values cannot be looked at: the plan of a call that differs from this
        one in dimensions alone, as that of a batch does from that of its examples.
        """
        shapeless, plans = _without_shapes(form), list(self.plans.items())
        similar = [plan for seen, plan in plans if _without_shapes(seen) == shapeless]
        if similar:
            return similar[-1]
        given = ", ".join(_described(t) for _, t in tensors_in((args, kwargs))) or "no tensor"
        mode = "training" if form[1] else "evaluation"
        raise RuntimeError(
            f"{_UNSEEN}: call the model once before torch.vmap, in {mode} mode and with arguments "
            f"as each example has them: {given}"
        ) from error

    def _demote(self, model: nn.Module, names: frozenset[str]) -> None:
        """Tags as weights what was taken for the readout before the model had run."""
        for name in sorted(names):
            tag(model.get_parameter(name), "weight")
            path, _, leaf = name.rpartition(".")
            why = "not the readout: make the optimizer after the first call"
            self.rows.append(Row(path, leaf, "tagged as weight", why))

    def _deepen(self, model: nn.Module, depths: dict[str, int]) -> None:
        """Tags parameters of residual branches, as far as they have no depth, with that found."""
        counts: Counter[int] = Counter()
        for name, depth in depths.items():
            parameter: Any = model.get_parameter(name)
            if has_parameter_data(parameter) and parameter.mup_scaling_depth is None:
                tag(model.get_parameter(name), parameter.mup_type, depth)
                counts[depth] += 1
        for depth, count in counts.items():
            why = f"depth {depth}, in residual branches: make the optimizer after the first call"
            self.rows.append(Row("", f"{count} parameters", "tagged with depth", why))

    def plan(self, model: nn.Module, seen: bool = True) -> ModelPlan:
        """The plan as data. Raises ValueError for functions in replace, which are no data, and
        unless ``seen`` is False before the first call.
        """
        if seen:
            self._check_seen(model)
        if self.replacements:
            raise ValueError("the plan of a model with functions in replace is no data")
        given = (self.init, self.residual, self.context_length, tags_in(model), tuple(self.rows))
        return ModelPlan(*given, *copy.deepcopy((self.plans, self._settled)))

    def adopt(self, plan: ModelPlan) -> None:
        """Takes a plan over, in place of a first look at the model."""
        self.rows = list(plan.rows)
        self.plans, self._settled = copy.deepcopy((plan.plans, plan.settled))
        self._latest = {form[1]: p for form, p in self.plans.items() if not form[0]}

    def _check_seen(self, model: nn.Module) -> None:
        if not any(form[0] == "" for form in self.plans):
            raise ValueError(
                f"{type(model).__name__} is unit-scaled and has not run: its factors are found at "
                "its first call, so call it once with an example batch"
            )

    def outside(self, model: nn.Module) -> Folded:
        """The factors of the weights of the plain model with the same function.

        Raises ValueError before the first call of the model, and where weights cannot hold all
        that the plain model lacks, with the calls.
        """
        if self.init == "preserve":
            if self.replacements:
                raise ValueError("functions that unit_scale was given in replace are in no weight")
            return Folded({}, {})
        self._check_seen(model)
        seen = [plan for form, plan in list(self.plans.items()) if form[0] == "" and not form[1]]
        if not seen:
            seen = [self._evaluated(model)]
        return folded([tie for plan in seen for tie in plan.ties])

    def _evaluated(self, model: nn.Module) -> Plan:
        """The plan of a model in evaluation that has run in training alone."""
        if self._example is None:
            raise ValueError(
                f"{type(model).__name__} is unit-scaled and has run in training alone: call it "
                "once in evaluation, with an example batch"
            )
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            args, kwargs = remade(self._example, device)
        return self.record(model, "", args, kwargs, evaluate=True)

    def report(self) -> list[Row]:
        """The rows of the weights, then of the calls of each plan, without repeats."""
        calls = [row for plan in list(self.plans.values()) for row in plan.rows]
        return list(dict.fromkeys([*self.rows, *calls]))

    def record(
        self,
        module: nn.Module,
        path: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        evaluate: bool = False,
    ) -> Plan:
        """The plan for a call of ``module``, from a run of a copy that shares its parameters.

        The copy has buffers of its own and no hooks; the random state is put back afterwards.
        evaluate: whether the copy runs in evaluation, whatever ``module`` does.
        Raises RuntimeError for a model that FSDP2 has sharded, which cannot be copied.
        """
        if is_sharded(module):
            raise RuntimeError(
                f"{_UNSEEN}, and cannot look at a sharded {type(module).__name__}: call the model "
                "once before fully_shard, with arguments of the same form"
            )
        twin = twin_of(module, self, _Recorded(self))
        if evaluate:
            twin.eval()
        wanted = [t.requires_grad for _, t in tensors_in((args, kwargs))]
        args, kwargs = detached((args, kwargs))
        prefix = f"{path}." if path else ""
        names = _names(twin, path)
        copies = [id(t) for _, t in tensors_in((args, kwargs))]
        given = dict(zip(copies, wanted, strict=True))
        weights = tagged_weights(twin, path)
        running, computing = self.path.items, parametrizations(twin, prefix)
        path_now = lambda: running[-1]  # noqa: E731
        recorder = Recorder(self.kinds, names, weights.factors, given, path_now, computing)
        devices = sorted({p.device.index or 0 for p in twin.parameters() if p.is_cuda})
        with torch.random.fork_rng(devices), torch.no_grad(), _SILENT, recorder:
            _RUNNING.items.append(self)
            try:
                result = self.within(path, lambda: twin(*args, **kwargs))
            finally:
                _RUNNING.items.pop()
        plan = make_plan(recorder.graph, self._settings(weights, whole=not path))
        if not path and self.init == "unit":
            buffers = {id(b): name for name, b in twin.named_buffers()}
            plan.ties = find_ties(recorder.graph, plan, buffers, recorder.results(result))
        return plan

    def _settings(self, weights: Weights, whole: bool) -> Settings:
        return Settings(
            weights=weights,
            replaced=frozenset(self.kinds[f] for f in self.replacements),
            preserve=self.init == "preserve",
            residual=self.residual,
            context=self.context_length,
            settled=self._settled,
            whole=whole,
        )


def _names(model: nn.Module, path: str) -> dict[int, str]:
    """The names of parameters, and of what they are once they are pruned, by id."""
    prefix = f"{path}." if path else ""
    names = {id(p): prefix + n for n, p in model.named_parameters(remove_duplicate=True)}
    for name, child in model.named_modules(prefix=path):
        masked = {id(getattr(child, n)): p for p, n in pruned(child).items()}
        names |= {key: f"{name}.{p}" if name else p for key, p in masked.items()}
    return names


class _Recorded:
    """The scope of the copy that is recorded, in place of that of the model."""

    order = UnitScale.order

    def __init__(self, scope: UnitScale) -> None:
        self.scope = scope
        self.path = scope.path

    def inside(self, path: str) -> Places | None:
        """As of the scope. Raises RuntimeError in a thread that the forward pass has started: it
        has no part in the plan, and would wait for the recording, which waits for it."""
        if not _RUNNING.items:
            raise RuntimeError(
                f"unit_scale: {path!r} runs in another thread than the forward pass that it is "
                "part of; a plan belongs to one thread: transform the parts, each by itself"
            )
        return self.scope.inside(path)

    def run(
        self, call: Call, module: nn.Module, path: str, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """As of the scope; raises as `inside`."""
        self.inside(path)
        return self.scope.run(call, module, path, args, kwargs)


def _covers(plan: Plan, path: str) -> bool:
    return any(p == path or p.startswith(f"{path}.") for p, _, _ in plan.steps)


def _form(value: Any) -> Any:
    """What of an argument may change which calls a model makes: its structure, not its sizes."""
    if isinstance(value, Tensor):
        ones = tuple(bool(size == 1) for size in value.shape)
        return ("tensor", value.dim(), ones, value.requires_grad)
    if isinstance(value, list | tuple):
        return tuple(_form(item) for item in value)
    if isinstance(value, dict):
        return tuple((name, _form(item)) for name, item in value.items())
    if value is None or isinstance(value, bool | str):
        return value
    return type(value).__name__


def _without_shapes(form: Any) -> Any:
    if isinstance(form, tuple) and form[:1] == ("tensor",):
        return ("tensor", form[-1])
    return tuple(map(_without_shapes, form)) if isinstance(form, tuple) else form


def _described(tensor: Tensor) -> str:
    wanted = ", requires a gradient" if tensor.requires_grad else ""
    return f"a tensor of shape {list(tensor.shape)}{wanted}"
