"""The transform of a model: its plan, and how calls of the model run under it."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fp8.common.threads import Stack, in_shape_inference
from fp8.modes.autocast import outside_compiler
from fp8.warnings import ScaleWarning, warn_once

from ...parameter import has_parameter_data
from ..install import (
    Args,
    Call,
    Called,
    Given,
    Kwargs,
    Scope,
    is_exported,
    is_sharded,
    run_in_mode,
    warn_of_break,
)
from ..plan.plan import ModelPlan, Step, Steps, fits
from ..plan.weights import adopt_tags, named_tags, pruned, refuse_split, refuse_weights, scaled
from ..record.calls import location, tensors_in
from ..record.kinds import KINDS, STEPPED
from ..record.place import Place
from ..record.probe import unobserved
from ..record.values import has_values, rms_of
from .gradients import GradientScales
from .learn import KEPT, UNSEEN, learned, steps_by_rule
from .ranks import agreed, is_alone, model_name
from .replay import Replay

Replacements = dict[Callable[..., Any], Callable[..., Any]]


class UnitScale(Scope):
    """The scope of unit scaling. plan: shared by copies made before the first call. applied: the
    number of recordings that this model's weights know of."""

    order = 0
    title = "unit_scale"
    unit_scaled = True
    no_export = (
        "unit_scale: its factors and the functions in replace are in the graph, in no weight. "
        "Train the model that unit_scale(model, batch=...) returns, which is a plain one, and "
        "export that"
    )

    def __init__(self, plan: ModelPlan, replacements: Replacements) -> None:
        self.plan = plan
        self.replacements = replacements
        self.skips = not self.replacements
        self.edition = "0"
        self.adopted = False  # whether the plan is that of a checkpoint
        self.name = ""
        self.path = Stack()
        self.applied = len(plan.entries)
        self.gradients = GradientScales(plan.gradients)
        self._finish()

    def _finish(self) -> None:
        self.recording = threading.RLock()
        self.looked: set[Place] = set()
        #: The functions whose calls may have a step -> their kinds.
        self.kinds = {function: kind for function, kind in KINDS.items() if kind in STEPPED}
        self.kinds |= {function: f"replace {i}" for i, function in enumerate(self.replacements)}

    def __getstate__(self) -> dict[str, Any]:
        made = ("recording", "looked", "kinds")
        return {name: value for name, value in vars(self).items() if name not in made}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._finish()

    def __deepcopy__(self, memo: dict[int, Any]) -> UnitScale:
        other = UnitScale.__new__(UnitScale)
        memo[id(self)] = other
        other.__setstate__(self.__getstate__())
        if self.plan.entries:
            other.plan = copy.deepcopy(self.plan)
        other.gradients = GradientScales(self.gradients.exponents())
        return other

    # Running

    def run(self, call: Call, module: Any, path: str, given: Given) -> Any:
        # Inline, as in `run_in_mode`.
        if not (torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting()):
            return outside_compiler(lambda: self.eager(call, module, path, given))
        if bool(self.edition) and module._is_known(id(self), id(module)):
            return run_in_mode(self, call, module, path, given)
        if is_exported():
            raise RuntimeError(f"{UNSEEN}: call the model once before torch.export")
        from ..graph_break import outside_graph

        return outside_graph(lambda: self.run(call, module, path, given))

    def is_known(self, path: str) -> bool:
        """Whether a call of the module at ``path`` from outside needs no recording."""
        return self.applied == len(self.plan.entries) and self.plan.covers(path)

    def eager(self, call: Call, module: nn.Module, path: str, given: Given) -> Any:
        warn_of_break(module)
        if vars(module).get("recorded", threading.get_ident()) != threading.get_ident():
            raise RuntimeError(
                f"unit_scale: {path!r} runs in another thread than the forward pass that it is "
                "part of, which records one thread: transform the parts, each by itself"
            )
        self._agree(module)
        if not self.is_known(path):
            if in_shape_inference():  # looks at each frame of the stack
                return call()
            with self.recording, unobserved():
                self._begin(module, path, given)
        return run_in_mode(self, call, module, path, given, eager=True)

    def mode(self, module: nn.Module, path: str, given: Given) -> Replay:
        return Replay(self, (module, path, given))

    def learn(
        self, place: Place, function: Any, args: Args, kwargs: Kwargs, called: Called
    ) -> Steps:
        """The steps of a place that no recording has shown: records the running call of a module. A
        call of torch that the recording does not show takes the rule of its op."""
        module: Any = called[0]
        if torch.compiler.is_dynamo_compiling():
            from ..graph_break import unknown_call

            module._tracing(False)  # the break is this transform's own
            unknown_call(lambda: None)
        if torch.compiler.is_exporting():
            raise RuntimeError(
                f"{UNSEEN}: torch.export takes a branch of {place[0] or 'the model itself'!r} that "
                f"no call of the model has taken ({place[1]} at {place[2] or 'its forward'}): call "
                "the model once with arguments of this form before"
            )
        with self.recording, unobserved():
            steps = self.plan.steps.get(place)
            if steps is not None:
                return steps
            by_rule, row = steps_by_rule(place, function, args, kwargs)
            if in_shape_inference() or not _is_readable((args, kwargs)):
                return by_rule
            if self.adopted:
                warn_once(ScaleWarning, _unplanned(place), about=module, key="adopted plan")
            if not is_sharded(module):
                self._record(called)
            if place not in self.plan.steps:
                self.plan.steps[place] = by_rule
                self.plan.rows.append(row)
            self._changed()
            return self.plan.steps[place]

    def warn_inside(self, place: Place, step: Step, module: nn.Module) -> None:
        """Warns if an autograd function, which no recording has shown, makes a call with a factor.
        Looks once for each place: torch.no_grad() leads here as well."""
        scaled = step.op is not None or bool(step.terms)
        if scaled and place not in self.looked and (inside := location()[1]):
            path, kind, _ = place
            warn_once(
                ScaleWarning,
                f"{kind} in {path or 'the model itself'} has a factor, and now runs inside "
                f"{inside}, which did not call it before: if its backward pass reads the weight "
                "itself, the gradient lacks the factor. Make the first call after unit_scale in "
                "the mode (training or evaluation) that is trained",
                about=module,
                key=f"inside {place}",
            )
        self.looked.add(place)

    # Recording

    def _begin(self, module: nn.Module, path: str, given: Given) -> None:
        """Records a module before its first call, and tags its weights as copies have learned."""
        if not self.plan.covers(path):
            _check_recordable(module, given)
            refuse_split(module)
            self._record((module, path, given))
            self.plan.tags |= named_tags(module, path)
            self.plan.entries.append(path)
        adopt_tags(module, path, self.plan.tags)
        self.applied = len(self.plan.entries)
        self._changed()

    def _changed(self) -> None:
        """Makes compiled graphs ask for the plan again."""
        self.edition = str(int(self.edition) + 1)

    def _record(self, called: Called) -> None:
        _warn_of_new_weights(called[0], self)
        plan, found = self.plan, learned(self, called)
        plan.steps |= {p: steps for p, steps in found.steps.items() if p not in plan.steps}
        kept = {(row.path, row.call) for row in found.rows if row.done == KEPT}
        known = set(plan.rows)
        rows = [*plan.rows, *(row for row in found.rows if row not in known)]
        plan.rows = [r for r in rows if r.done == KEPT or (r.path, r.call) not in kept]

    def _agree(self, module: nn.Module) -> None:
        """Makes the measured scales of gradients equal in all processes."""
        if not is_alone():
            self.name = self.name or model_name(name for name, _ in module.named_parameters())
            self.gradients.agree(lambda exponents: self.agreed("gradients", exponents))

    def agreed(self, what: str, values: Mapping[Any, Any]) -> dict[Any, Any]:
        return agreed(f"{self.name}/{what}", values)

    # The plan in the state_dict

    def data(self, model: nn.Module) -> ModelPlan:
        """The plan with the tags of ``model``, without steps before the first call."""
        if self.plan.entries:
            self._agree(model)
        plan = copy.deepcopy(self.plan)
        plan.tags, plan.gradients = named_tags(model, ""), self.gradients.exponents()
        return plan

    def _adopt(self, model: nn.Module, plan: ModelPlan) -> None:
        adopt_tags(model, "", plan.tags, rescale=False)
        self.plan, self.gradients = copy.deepcopy(plan), GradientScales(plan.gradients)
        self.plan.tags = {n: t for n, t in plan.tags.items() if plan.covers(n)}
        self.applied, self.adopted = len(plan.entries), bool(plan.entries)
        self._changed()

    def adopt_saved(self, model: nn.Module, text: str) -> None:
        """Adopts the plan of a checkpoint as JSON if it fits ``model``. One from before the first
        call replaces that of a model that has run only if weights have other values by now: the
        model is then recorded again."""
        with contextlib.suppress(ValueError):
            plan = ModelPlan.from_json(text)
            differs = not scaled(plan.tags) <= scaled(named_tags(model, ""))
            newer = bool(plan.entries) or not self.plan.entries or differs
            if newer and fits(model, plan):
                self._adopt(model, plan)


def _unplanned(place: Place) -> str:
    path, kind, lines = place
    return (
        f"the plan of the checkpoint has no {kind} in {path or 'the model itself'} at {lines!r}: "
        "the code has changed since, or this branch had not run. The call is measured now"
    )


def _is_readable(given: Given, module: nn.Module | None = None) -> bool:
    """Whether the values of arguments, and of the parameters of ``module``, can be read; those of
    the examples inside torch.vmap cannot."""
    tensors = [t for t in (*given[0], *given[1].values()) if isinstance(t, Tensor)]
    return has_values((*tensors, *(() if module is None else module.parameters())))


def _check_recordable(module: nn.Module, given: Given) -> None:
    refuse_weights(module, quantized=True)
    if any(t.is_meta for _, t in tensors_in(given)):
        raise RuntimeError(
            "the first call of a unit-scaled model looks at values, and there are none on the meta "
            "device: call it once where its weights are"
        )
    if is_sharded(module):
        raise RuntimeError(
            f"{UNSEEN}, and cannot record a sharded {type(module).__name__}: call the model once "
            "before fully_shard, FullyShardedDataParallel or parallelize_module"
        )
    for name, part in module.named_modules():
        tagged = {*getattr(part, "mup_tags", {})}
        if tagged & vars(part).keys() - pruned(part).values() or not all(
            isinstance(p, nn.Parameter) for p in part.parameters(recurse=False)
        ):
            raise RuntimeError(
                f"{UNSEEN}: call the model once before torch.func.functional_call or DataParallel, "
                f"which replace its parameters (those of {name or 'the model itself'})"
            )
    if not _is_readable(given, module):
        raise RuntimeError(f"{UNSEEN}: call the model once before torch.vmap")


def _warn_of_new_weights(model: nn.Module, scope: UnitScale) -> None:
    """Warns of weights that came into the model after ``scope`` and are far from RMS 1."""
    far: dict[str, float] = {}
    for path, module in model.named_modules():
        if any(other is scope for other, _ in getattr(module, "_scopes", ())):
            continue
        for name, p in module.named_parameters(path, recurse=False):
            is_weight = p.dtype.is_floating_point and p.numel() > max(p.shape, default=1)
            if is_weight and not has_parameter_data(p) and not 0.5 <= (rms := rms_of(p)) <= 2:
                far[name] = rms
    if far:
        name, rms = next(iter(far.items()))
        more = f" (and {len(far) - 1} more)" if len(far) > 1 else ""
        warn_once(
            ScaleWarning,
            f"{name}{more} came into the model after unit_scale and has RMS {rms:.3g}, where its "
            "operation expects about 1: put in unit_scale(layer) in place of the layer, or a "
            "module of unit_scaling",
            about=model,
            key=" ".join(far),
        )
