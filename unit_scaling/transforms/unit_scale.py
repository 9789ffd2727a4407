"""`unit_scale`: a model becomes unit-scaled in one line."""

from __future__ import annotations

import contextlib
import copy
import inspect
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fp8.autocast import outside_compiler
from fp8.names import check_name
from fp8.subclass import check_module

from ..parameter import has_parameter_data, remember_tags, tag
from .calls import KINDS
from .compile import copied
from .copies import Example, detached, example_of, remade, twin_of
from .install import Call, Places, find_scope, install, is_exported, is_sharded, unwrapped
from .model_plan import ModelPlan, check_fits, retag, tags_in
from .plan import make_plan
from .pretrained import keep_transform, register
from .ratios import find_ties
from .record import Recorder, tensors_in
from .replay import PlanMissError, Replay, is_torch_function
from .residuals import RESIDUALS
from .solve import Folded, folded
from .steps import Plan, Row, Settings, Settled, Weights
from .weights import parametrizations, prepare, pruned, refuse_weights, tagged_weights

__all__ = ["UnitScale", "register_transformers", "restore", "unit_scale"]

M = TypeVar("M", bound=nn.Module)
Replacements = dict[Callable[..., Any], Callable[..., Any]]

INITS = ("unit", "preserve")
# How the configurations of models name the longest sequence, the most common first.
CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "block_size", "max_seq_len", "n_ctx")
# The scopes that are running, innermost last: at most one, in practice.
_RUNNING: list[UnitScale] = []

_UNSEEN = "unit_scale has not seen this form of call yet"


class UnitScale:
    """The scope of unit scaling: the plans of a model, one for each form of call."""

    order = 0

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
        self.path: list[str] = []
        self._latest: dict[bool, Plan] = {}
        self._example: Example | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "kinds": None, "path": [], "_example": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.kinds = KINDS | {f: f"replace {i}" for i, f in enumerate(self.replacements)}

    @property
    def scales_weights(self) -> bool:
        """Whether the weights of the model are not those of the plain one."""
        return self.init == "unit"

    def inside(self, path: str) -> Places | None:
        """Its name in the scope that is running: a part with a transform of its own is in the plan
        of the whole.
        """
        if not _RUNNING:
            return None
        outer = _RUNNING[-1]
        return ((outer.path, path if outer is self else f"{outer.path[-1]} > {path}"),)

    def run(
        self, call: Call, module: nn.Module, path: str, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """``call()`` under the plan for this form of call, made at its first time."""
        for _, name in self.inside(path) or ():
            return _RUNNING[-1].within(name, call)
        form = (path, module.training, _form(args), _form(kwargs))
        plan = self._known(form, path, module.training)
        if torch.compiler.is_compiling():
            if plan is not None:
                return self._replay(plan, call, path)
            if is_exported():
                raise RuntimeError(f"{_UNSEEN}: call the model once before torch.export")
            from .first_call import outside_graph

            return outside_graph(lambda: self.run(call, module, path, args, kwargs))
        return outside_compiler(lambda: self._eager(form, call, module, path, args, kwargs))

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
        plan = self._known(form, path, module.training)
        if plan is not None:
            try:
                return self._replay(plan, call, path)
            except PlanMissError:
                pass  # it has taken another branch: see it again
        return self._first(form, call, module, path, args, kwargs)

    def within(self, path: str, call: Call) -> Any:
        """``call()``, the forward of the module named ``path``."""
        self.path.append(path)
        try:
            return call()
        finally:
            self.path.pop()

    def _replay(self, plan: Plan, call: Call, path: str, eager: bool = False) -> Any:
        if not (eager or torch.compiler.is_compiling()):
            return outside_compiler(lambda: self._replay(plan, call, path, eager=True))
        # Not a with statement: a graph break inside one is resumed in pieces, each compiled while
        # the mode is active. Inside try, it leaves this frame, from its start, to eager mode.
        mode = Replay(plan, self.kinds, self.replacements, self.path)
        _RUNNING.append(self)
        mode.__enter__()
        try:
            return self.within(path, call)
        finally:
            mode.__exit__(None, None, None)
            _RUNNING.pop()

    def _first(
        self,
        form: Any,
        call: Call,
        module: nn.Module,
        path: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Records the model, makes the plan, then runs it."""
        try:
            plan = self.record(module, path, args, kwargs)
        except RuntimeError as error:
            if not str(error).startswith("vmap:"):
                raise
            raise RuntimeError(f"{_UNSEEN}: call the model once before torch.vmap") from error
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
        return self._replay(plan, call, path)

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

    def follow(self, plan: ModelPlan) -> None:
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
        seen = [plan for form, plan in self.plans.items() if form[0] == "" and not form[1]]
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
        calls = [row for plan in self.plans.values() for row in plan.rows]
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
        twin = twin_of(module, self)
        if evaluate:
            twin.eval()
        wanted = [t.requires_grad for _, t in tensors_in((args, kwargs))]
        args, kwargs = detached((args, kwargs))
        prefix = f"{path}." if path else ""
        names = _names(twin, path)
        copies = [id(t) for _, t in tensors_in((args, kwargs))]
        given = dict(zip(copies, wanted, strict=True))
        weights = tagged_weights((prefix + n, p) for n, p in twin.named_parameters())
        computing = parametrizations(twin, prefix)
        path_now = lambda: self.path[-1]  # noqa: E731
        recorder = Recorder(self.kinds, names, weights.factors, given, path_now, computing)
        devices = sorted({p.device.index or 0 for p in twin.parameters() if p.is_cuda})
        with torch.random.fork_rng(devices), torch.no_grad(), warnings.catch_warnings(), recorder:
            warnings.simplefilter("ignore")  # they come when the model runs
            _RUNNING.append(self)
            try:
                result = self.within(path, lambda: twin(*args, **kwargs))
            finally:
                _RUNNING.pop()
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
    for name, part in model.named_modules(prefix=path):
        masked = {id(getattr(part, n)): p for p, n in pruned(part).items()}
        names |= {key: f"{name}.{p}" if name else p for key, p in masked.items()}
    return names


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


def unit_scale(
    module: M,
    replace: Replacements | None = None,
    *,
    init: str = "unit",
    residual: str = "fixed",
    strict: bool = False,
    context_length: int | None = None,
    plan: ModelPlan | None = None,
) -> M:
    """A unit-scaled copy of ``module``.

    What each call needs is worked out at the first call, from the model's data flow, and shown by
    `unit_scaling.report`. The copy is the same model in every other way.

    replace: torch function -> function to call in its place, with the same arguments, e.g.
    {F.relu: U.relu_squared}. One that has no argument ``inplace`` is called without it: its result
    is a new tensor.
    init: "unit" brings every weight to RMS 1 and every bias to 0; "preserve" keeps the function
    that the model computes, to rounding: the scale of each weight moves into the op's factor.
    residual: the weights of residual branches: "fixed", 0.5 for feed-forward and 0.01 for
    attention branches, or "umup", the rule by depth of `uu.transformer_residual_scaling_rule`;
    the first call then tags the parameters of the branches with the depth of their stack.
    strict: raise ValueError at the first call that is left alone.
    context_length: the number of keys that attention is scaled for, whatever the length at hand,
    so that a prompt and its continuation compute the same. By default that of the model's
    configuration (``max_position_embeddings``, ``n_positions``, ``block_size``), or else the
    number of keys of each attention call when it is first made.

    plan: what `unit_scaling.plan` gave for a model of the same architecture, with its init,
    residual and context_length: the weights are divided by the same numbers, and no first call is
    looked at.

    Raises TypeError for what is not a module or is TorchScript, and for a replacement that is no
    function; ValueError for an unknown option, a replacement for what is not a torch function, and
    a weight that a hook computes (`torch.nn.utils.weight_norm`). The first call raises ValueError
    for a function, not a module, under `torch.utils.checkpoint`: it would be computed again without
    its scales; RuntimeError inside `torch.export` or `torch.vmap`, which take a model that has run
    once.
    """
    check_module("unit_scale", module)
    check_name("init", init, INITS)
    check_name("residual", residual, RESIDUALS)
    _check_replacements(replace or {})
    refuse_weights(module)
    result = copied(module)
    inner = unwrapped(result)
    if find_scope(inner, UnitScale) is not None:
        return result
    if plan is not None:
        check_fits(inner, plan)
        given = {"init": init, "residual": residual, "context_length": context_length}
        init, residual, context_length = _of_plan(plan, given, replace)
    elif context_length is None:
        context_length = _configured_length(inner)
    elif not isinstance(context_length, int) or context_length < 1:
        raise ValueError(f"context_length is a positive number of keys, got {context_length!r}")
    scope = UnitScale(
        prepare(inner, init),
        {function: _out_of_place(other) for function, other in (replace or {}).items()},
        init=init,
        residual=residual,
        strict=strict,
        context_length=context_length,
    )
    if plan is not None:
        retag(inner, plan, rescale=True)
        scope.follow(plan)
    _give(inner, scope)
    return result


def restore(model: nn.Module, plan: ModelPlan) -> None:
    """Makes ``model``, whose weights are those of a unit-scaled model already, one in place.

    Raises ValueError where the plan is of another model.
    """
    check_fits(model, plan)
    settings: dict[str, Any] = {"init": plan.init, "residual": plan.residual, "strict": False}
    scope = UnitScale([], {}, **settings, context_length=plan.context_length)
    retag(model, plan, rescale=False)
    scope.follow(plan)
    _give(model, scope)


def _give(model: nn.Module, scope: UnitScale) -> None:
    install(model, scope)
    if scope.scales_weights:
        keep_transform(model, restore)


def register_transformers() -> None:
    """Has ``from_pretrained`` of the library transformers put the transform of a model back that
    was saved unit-scaled, with its plan: the result computes the same, to the bit.

    `unit_scale` calls it for a model of that library. A program that only loads such models calls
    it once. Raises ImportError without transformers.
    """
    register(restore)


def _check_replacements(replace: Replacements) -> None:
    if not all(map(callable, dict(replace).values())):
        raise TypeError(f"replace: what is called in place of a function is one, got {replace!r}")
    for function in replace:
        if not (function in KINDS or is_torch_function(function)):
            raise ValueError(
                f"replace: {function!r} is not a torch function, nothing sees it run; call what is "
                "to take its place in the model itself"
            )


def _of_plan(plan: ModelPlan, given: dict[str, Any], replace: Replacements | None) -> Any:
    """init, residual and context_length of a plan; raises ValueError for others that were given."""
    if replace:
        raise ValueError("plan: it has no place for functions in replace")
    defaults = {"init": "unit", "residual": "fixed", "context_length": None}
    for name, value in given.items():
        planned = getattr(plan, name)
        if value not in (defaults[name], planned):
            raise ValueError(f"plan: it was made with {name}={planned!r}, got {name}={value!r}")
    return plan.init, plan.residual, plan.context_length


def _out_of_place(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, or if it has no argument ``inplace``, one that drops it."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:  # of C, as torch.relu, without a signature
        parameters = []
    takes = any(p.name == "inplace" or p.kind is p.VAR_KEYWORD for p in parameters)
    return function if takes else partial(_without_inplace, function)


def _without_inplace(
    function: Callable[..., Any], *args: Any, inplace: bool = False, **kwargs: Any
) -> Any:
    return function(*args, **kwargs)


def _configured_length(model: nn.Module) -> int | None:
    config = getattr(model, "config", None)
    found = (getattr(config, name, None) for name in CONTEXT_NAMES)
    return next((n for n in found if type(n) is int and n > 0), None)
