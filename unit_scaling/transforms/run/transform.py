"""The transform of a model: its plan, and how calls of the model run under it."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fp8.common.pitfalls import ScaleWarning, warn_once
from fp8.common.threads import Stack, in_shape_inference
from fp8.modes.autocast import outside_compiler
from fp8.modes.control_flow import RUNS
from fp8.modes.dispatch import COMPOSED

from ...parameter import Tags, has_parameter_data, remember_tags, tag, tags_of
from ..folding.solve import Folded, folded
from ..install import (
    Args,
    Call,
    Given,
    Kwargs,
    edited,
    find_scope,
    install,
    is_exported,
    is_flattened,
    is_sharded,
    warn_of_break,
)
from ..plan.plan import CallRow, ModelPlan, Steps, adopt, check_fits
from ..plan.weights import adopt_tags, pruned
from ..record.kinds import KINDS, LAYERS, PRODUCTS, RECURRENT
from ..record.place import Place
from ..record.values import has_values, rms_of
from .gradients import GradientScales
from .learn import KEPT, UNSEEN, Learned, learned, steps_by_rule
from .ranks import agreed_once, fingerprint, is_alone, numbered
from .replay import RUNNING, Replay

Replacements = dict[Callable[..., Any], Callable[..., Any]]


class UnitScale:
    """The scope of unit scaling. plan: shared by copies made before the first call, so that they
    compute the same function. applied: the number of recordings that this model's weights know of.
    """

    order = 0
    each = False
    named = True

    def __init__(
        self, plan: ModelPlan, replacements: Replacements | None = None, strict: bool = False
    ) -> None:
        self.plan = plan
        self.replacements = dict(replacements or {})
        self.strict = strict
        self.edition = "0"
        self.name = ""
        self.path = Stack()
        self.applied = len(plan.entries)
        self.gradients = GradientScales(plan.gradients)
        self._finish()

    def _finish(self) -> None:
        """Makes what copies and pickles leave out."""
        self.running = Stack()
        self.recording = threading.RLock()
        numbers = {f: f"replace {i}" for i, f in enumerate(self.replacements)}
        self.kinds: Mapping[Callable[..., Any], str] = {**KINDS, **numbers}
        kinds = [*PRODUCTS, *RECURRENT, *numbers.values()]
        self.stepped = dict.fromkeys(kinds if self.preserves else ["add", *kinds], True)
        steps = {f: kind for f, kind in self.kinds.items() if kind in self.stepped}
        self.handled = {**steps, **dict.fromkeys((*COMPOSED, *RUNS, torch.einsum), "")}

    @property
    def preserves(self) -> bool:
        return self.plan.init == "preserve"

    @property
    def title(self) -> str:
        """What ``print(model)`` shows."""
        return f"unit_scale(init={self.plan.init!r})"

    @property
    def unit_scaled(self) -> bool:
        """Whether weights and activations have RMS 1; not so with init="preserve"."""
        return not self.preserves

    def __getstate__(self) -> dict[str, Any]:
        made = ("running", "recording", "kinds", "stepped", "handled")
        return {name: value for name, value in vars(self).items() if name not in made}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._finish()

    def __deepcopy__(self, memo: dict[int, Any]) -> UnitScale:
        """A copy with the same plan while that is empty, and with a plan of its own afterwards."""
        other = UnitScale.__new__(UnitScale)
        memo[id(self)] = other
        other.__setstate__(self.__getstate__())
        if self.plan.entries:
            other.plan = self.plan.copy()
        other.gradients = GradientScales(self.gradients.exponents())
        return other

    # Running

    def run(self, call: Call, module: Any, path: str, given: Given) -> Any:
        """Returns ``call()``, the forward of ``module`` called from outside of the transform."""
        # Per thread: `is_compiling` is true in all threads while one compiles (torch 2.13).
        # Repeated inline, because a helper function would be compiled itself, to True.
        compiling = torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting()
        if not compiling:
            return outside_compiler(lambda: self._eager(call, module, path, given))
        if bool(self.edition) and module._asks(id(self), id(module), "is_known"):
            return self._replay(call, module, path, given)
        if is_exported():
            raise RuntimeError(f"{UNSEEN}: call the model once before torch.export")
        from ..graph_break import outside_graph

        return outside_graph(lambda: self.run(call, module, path, given))

    def is_known(self, module: nn.Module, path: str) -> bool:
        """Whether a call of ``module`` from outside needs no recording."""
        return self.plan.covers(path) and self.applied == len(self.plan.entries)

    def _eager(self, call: Call, module: nn.Module, path: str, given: Given) -> Any:
        warn_of_break(module)
        if in_shape_inference():
            return call()
        if vars(module).get("recorded", threading.get_ident()) != threading.get_ident():
            raise RuntimeError(
                f"unit_scale: {path!r} runs in another thread than the forward pass that it is "
                "part of, which records one thread: transform the parts, each by itself"
            )
        self._agree(module)
        if edited(self) and self.plan.covers(path) and not is_sharded(module):
            with self.recording:  # modules came in, of which no recording knows
                self._join(module, path)
        if not (self.is_known(module, path) or (self.preserves and not _readable(given, module))):
            with self.recording:
                self._begin(module, path, given)
        return self._replay(call, module, path, given, eager=True)

    def _replay(self, call: Call, module: Any, path: str, given: Given, eager: bool = False) -> Any:
        # Not a with statement: a graph break inside one is resumed in pieces, each compiled while
        # the mode is active. Inside try, a graph break leaves the whole frame to eager mode.
        traced = torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting()
        if not (eager or traced):  # after a graph break
            return outside_compiler(lambda: self._eager(call, module, path, given))
        mode = Replay(self, self, self.path.items, not self.preserves)
        if traced:
            module._tracing(True)
        self.running.items.append((module, path, given))
        RUNNING.items.append(self)
        self.path.items.append(path)
        mode.__enter__()
        try:
            output = call()
        finally:
            mode.__exit__(None, None, None)
            self.path.items.pop()
            RUNNING.items.pop()
            self.running.items.pop()
        if traced:
            module._tracing(False)
        return output

    def learn(self, place: Place, function: Any, args: Args, kwargs: Kwargs) -> Steps:
        """The steps of a place that no recording has shown: the model is recorded again with the
        arguments of the running call, whose branch it takes. A call that it does not make then
        takes the rule of its op."""
        if torch.compiler.is_dynamo_compiling():
            from ..graph_break import unknown_call

            self.running.items[-1][0]._tracing(False)  # the break is this transform's own
            unknown_call(lambda: None)
        if torch.compiler.is_exporting():
            raise RuntimeError(
                f"{UNSEEN}: torch.export takes a branch of {place[0] or 'the model itself'!r} that "
                f"no call of the model has taken ({place[1]} at {place[2] or 'its forward'}): call "
                "the model once with arguments of this form before"
            )
        with self.recording:
            steps = self.plan.steps.get(place)
            if steps is not None:
                return steps
            module, path, given = self.running.items[-1]
            if not _readable((args, kwargs)):
                return steps_by_rule(place, function, args, kwargs, self.preserves)[0]
            if not is_sharded(module):
                self._record(module, path, given)
            steps = self.plan.steps.get(place)
            if steps is None:
                steps, row = steps_by_rule(place, function, args, kwargs, self.preserves)
                self.plan.steps[place] = steps
                self.plan.rows.append(row)
            self.edition = str(int(self.edition) + 1)
            return steps

    # Recording

    def _begin(self, module: nn.Module, path: str, given: Given) -> None:
        """Records ``module`` before its first call, and applies to its weights what copies of it
        have learned."""
        if not self.plan.covers(path):
            _check_seen(module, given)
            self._record(module, path, given)
            self.plan.tags |= _tags(module, path)
            self.plan.entries.append(path)
        adopt_tags(module, path, self.plan.tags)
        remember_tags(module)
        self.applied = len(self.plan.entries)
        self.edition = str(int(self.edition) + 1)

    def _record(self, module: nn.Module, path: str, given: Given) -> None:
        """Records a call of ``module`` and adds what is new to the plan."""
        self._join(module, path)
        self._set_name(module)
        found = learned(self, module, path, given)
        self._add(module, path, found)

    def _add(self, module: nn.Module, path: str, found: Learned) -> None:
        plan = self.plan
        new = {place: steps for place, steps in found.steps.items() if place not in plan.steps}
        plan.steps |= new
        if not plan.covers(path):
            self._demote(module, path, found.inner)
            self._deepen(module, path, found.depths)
        kept = {(row.path, row.call) for row in found.rows if row.done == KEPT}
        plan.rows = [row for row in plan.rows if (row.path, row.call) not in kept]
        known = set(plan.rows)
        plan.rows += [row for row in found.rows if row not in known]
        if not path:
            plan.ties = plan.ties or found.ties
        for row in plan.rows if self.strict else ():
            if row.left_alone:
                raise ValueError(
                    f"unit_scale(strict=True): {row.call} in {row.path or 'the model itself'!r} "
                    f"has no rule: {row.why}"
                )

    def _set_name(self, module: nn.Module) -> None:
        """Names the model: all processes ask for names in the same order."""
        if not self.name:
            names = sorted(name for name, _ in module.named_parameters())
            self.name = numbered(fingerprint(names))

    def _agree(self, module: nn.Module) -> None:
        """Makes the measured scales of gradients equal in all processes."""
        if not is_alone():
            self._set_name(module)
            self.gradients.agree(lambda exponents: self.agreed("gradients", exponents))

    def agreed(self, what: str, values: Mapping[Any, Any]) -> dict[Any, Any]:
        """``values``, or those of the first process of the job: all compute one function."""
        return agreed_once(f"{self.name}/{what}", values)

    def _join(self, module: nn.Module, path: str) -> None:
        """Adds modules that came into the model since."""
        self.check_parts(module, path)
        if self.unit_scaled:
            _warn_of_new_weights(module, self)
        install(module, self, path, only_new=True)

    def check_parts(self, module: nn.Module, path: str = "") -> None:
        """Raises ValueError for a part with init="unit" in a model with init="preserve"."""
        for name, child in module.named_modules(prefix=path):
            other = find_scope(child, UnitScale)
            if other is not None and other is not self and other.unit_scaled and self.preserves:
                raise ValueError(
                    f"{name or 'the model'} was unit-scaled with init='unit', and the model around "
                    "it with init='preserve', which has no factors: use one init for both"
                )

    def _demote(self, module: nn.Module, path: str, names: frozenset[str]) -> None:
        """Tags as weights the parameters that were taken for the readout before the first call."""
        for name in sorted(names):
            tag(_parameter(module, path, name), "weight")
            owner, _, leaf = name.rpartition(".")
            why = "not the readout"
            self.plan.rows.append(CallRow(owner, leaf, "tagged as weight", why))

    def _deepen(self, module: nn.Module, path: str, depths: dict[str, int]) -> None:
        """Sets the depth tag of residual branch parameters that have none."""
        counts: Counter[int] = Counter()
        for name, depth in depths.items():
            parameter = _parameter(module, path, name)
            tags = tags_of(parameter)
            if hasattr(parameter, "mup_type") and tags.mup_scaling_depth is None:
                tag(parameter, tags.mup_type, depth)
                counts[depth] += 1
        for depth, count in counts.items():
            why = f"depth {depth}, in residual branches: make the optimizer after the first call"
            self.plan.rows.append(CallRow("", f"{count} parameters", "tagged with depth", why))

    # The plan as data

    def data(self, model: nn.Module) -> ModelPlan:
        """The plan with the tags of ``model``, without steps before the first call. Raises
        ValueError for functions in ``replace``."""
        if self.replacements:
            raise ValueError("the plan of a model with functions in replace cannot be saved")
        self._agree(model)
        found = self.plan.copy()
        found.tags, found.gradients = _tags(model, ""), self.gradients.exponents()
        return found

    def saved(self, model: nn.Module) -> str:
        """The plan as JSON, for the state_dict of ``model``; "" if there is none."""
        known = "" in self.plan.entries and not self.replacements
        return self.data(model).to_json() if known else ""

    def adopt(self, model: nn.Module, plan: ModelPlan, rescale: bool) -> None:
        """Adopts a plan instead of recording the model. Raises ValueError if it is for another."""
        check_fits(model, plan)
        adopt(model, plan, rescale)
        self.plan, self.gradients = plan.copy(), GradientScales(plan.gradients)
        self.applied = len(plan.entries)
        self.edition = str(int(self.edition) + 1)

    def adopt_saved(self, model: nn.Module, text: str) -> None:
        """Adopts the plan of a checkpoint as JSON if it fits ``model``."""
        with contextlib.suppress(ValueError):
            self.adopt(model, ModelPlan.from_json(text), rescale=False)

    def check_seen(self, model: nn.Module) -> None:
        if "" not in self.plan.entries:
            raise ValueError(
                f"{type(model).__name__} is unit-scaled and has not run: its factors are found at "
                "its first call, so call it once with an example batch"
            )

    def factors(self, model: nn.Module) -> Folded:
        """The factors that multiply the weights in the plain model with the same function. Raises
        ValueError before the first call, and naming the calls whose factors no weight can absorb.
        """
        if self.replacements:
            raise ValueError("functions in replace of unit_scale cannot be folded into weights")
        if not self.preserves:
            self.check_seen(model)
        found = Folded({}, {}) if self.preserves else folded(self.plan.ties)
        return found._replace(exponents=_input_exponents(self.plan.steps))


def _input_exponents(steps: Mapping[Place, Steps]) -> dict[str, int]:
    """As in `Folded`; without modules whose products cast their inputs at several exponents."""
    found: dict[str, set[int]] = defaultdict(set)
    for (path, kind, _), own in steps.items():
        if kind in LAYERS:
            found[path] |= {dict(step.static).get((0,), 0) if step else 0 for step in own}
    return {path: exponents.pop() for path, exponents in found.items() if len(exponents) == 1}


def _tags(module: nn.Module, path: str) -> dict[str, Tags]:
    """Parameter name -> its tags."""
    named = module.named_parameters(prefix=path)
    return {n: tags_of(p) for n, p in named if has_parameter_data(p)}


def _parameter(module: nn.Module, path: str, name: str) -> nn.Parameter:
    return module.get_parameter(name.removeprefix(f"{path}." if path else ""))


def _readable(given: Given, module: nn.Module | None = None) -> bool:
    """Whether the values of arguments, and of the parameters of ``module``, can be read; those of
    the examples inside torch.vmap cannot."""
    tensors = [t for t in (*given[0], *given[1].values()) if isinstance(t, Tensor)]
    return has_values((*tensors, *(() if module is None else module.parameters())))


def _check_seen(module: nn.Module, given: Given) -> None:
    """Raises where a model cannot be recorded."""
    if any(isinstance(value, torch.fx.Proxy) for value in (*given[0], *given[1].values())):
        raise TypeError(
            "torch.fx.symbolic_trace cannot trace a unit-scaled model, whose factors are no calls "
            "of its modules: trace it before unit_scale, or take torch.export"
        )
    if is_flattened(module) or is_sharded(module):
        raise RuntimeError(
            f"{UNSEEN}, and cannot record a sharded {type(module).__name__}: call the model once "
            "before fully_shard, FullyShardedDataParallel or parallelize_module"
        )
    if not _readable(given, module):
        raise RuntimeError(f"{UNSEEN}: call the model once before torch.vmap")
    for name, child in module.named_modules():
        if any(type(p) is not nn.Parameter for p in child._parameters.values() if p is not None):
            continue
        own = vars(child).keys() - pruned(child).values()
        lost = [n for n in getattr(child, "mup_tags", {}) if n in own]
        if lost:
            raise RuntimeError(
                f"{UNSEEN}: call the model once before torch.func.functional_call or DataParallel, "
                f"which replace its parameters ({name}.{lost[0]})"
            )


def _warn_of_new_weights(model: nn.Module, scope: UnitScale) -> None:
    """Warns of weights that came into the model after ``scope`` and are far from RMS 1."""
    found: dict[str, float] = {}
    for path, module in model.named_modules():
        if any(other is scope for other, _ in getattr(module, "_scopes", ())):
            continue
        for name, p in module.named_parameters(path, recurse=False):
            if not has_parameter_data(p) and p.dtype.is_floating_point:
                found[name] = rms_of(p) if p.numel() > max(p.shape, default=1) else 1.0
    found = {name: rms for name, rms in found.items() if not 0.5 <= rms <= 2}
    if found:
        name, rms = next(iter(found.items()))
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        warn_once(
            ScaleWarning,
            f"{name}{more} came into the model after unit_scale and has RMS {rms:.3g}, where its "
            "operation expects about 1: put in unit_scale(layer) in place of the layer, or a "
            "module of unit_scaling",
            about=model,
            key=" ".join(found),
        )
