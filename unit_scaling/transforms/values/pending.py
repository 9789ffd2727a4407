"""`unit_scale(model)` without a batch: the first call of the model decides.

Until then the model and its copies have hooks, which share a record. The first call of any of them
decides for all that are alive, and their hooks are removed. Copies that come from elsewhere (a
pickle) take the same numbers in their own first call. Values that were written since `unit_scale`
are the user's and stay as they are. A model that was edited is decided on as it is then: its
modules are known by their hooks, whatever they are called.

A state_dict of a pending model has plain values, which its metadata says. A pending model with all
plain values of another one, however they came there, is a copy of that. Others that have some of
them are set as if these had been there from the beginning.
"""

from __future__ import annotations

import copy
import math
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from threading import RLock
from typing import Any

import torch
from torch import Tensor, nn

from fp8.common.report import Report, Row
from fp8.common.step import kept, unwrapped
from fp8.frame import framed
from fp8.torch_internals.decorators import untraced
from fp8.torch_internals.pipelining import in_shape_inference
from fp8.warnings import ScaleWarning, warn_once

from ...checks.first_call import is_readable
from ...common.calls import Args, Given, Kwargs
from ...parameter import has_parameter_data, remember_tags, retag, tags_of
from ..install import is_in_fsdp
from ..record.calls import tensors_in
from ..record.values import has_scale, has_values, in_double, rms_of
from .parameters import Change, own_parameters, starts_of
from .ranks import model_name
from .set_values import REACH, Decision, decide

REPORTS: weakref.WeakKeyDictionary[nn.Module, Report[Row]] = weakref.WeakKeyDictionary()
"""A model -> what was done to its parameters."""

DECIDED: weakref.WeakKeyDictionary[nn.Module, Record] = weakref.WeakKeyDictionary()
"""A model that was pending -> its record, as others may have its plain values."""

METADATA = "unit_scale"
"""The key by which the metadata of a module in a state_dict says that values are plain."""

PLACES = 64
"""The number of values of a parameter that tell whether it was written."""


@dataclass(frozen=True)
class _Sample:
    """Some values of a parameter."""

    values: Tensor
    dtype: torch.dtype

    def is_of(self, parameter: Tensor) -> bool:
        """Whether a parameter has these values, but for rounding: by another dtype, or by a moving
        average of equal values."""
        other = _sample(parameter)
        if other is None or other.values.shape != self.values.shape:
            return True  # it has no values to compare, or is divided among processes
        return self.equals(other)

    def equals(self, other: _Sample | None) -> bool:
        """Whether these are the same values, but for rounding."""
        if other is None or other.values.shape != self.values.shape:
            return False
        precision = max(
            (torch.finfo(self.dtype), torch.finfo(other.dtype)), key=lambda x: x.eps
        )
        unit = 4 * precision.eps
        return torch.allclose(
            other.values, self.values, rtol=unit, atol=unit * precision.smallest_normal
        )


@torch.no_grad()
def _sample(parameter: Tensor) -> _Sample | None:
    if not (is_readable(parameter) and has_scale(parameter)):
        return None
    flat = parameter.detach().flatten()
    step = math.ceil(flat.numel() / PLACES)
    values = in_double(flat[::step].clone())
    return _Sample(values.cpu(), parameter.dtype)


Samples = dict[str, _Sample | None]


@dataclass(eq=False)
class Record:
    """What a pending model and its copies share.

    key: of this process. title: of the model in all processes of the job. samples: of parameters,
    by name. changes: of parameters, None while pending; keys are names in the model when it became
    pending, whatever edits have done since, with a "+" for those that have come since. runs:
    whether the decision is being made.
    """

    key: str
    title: str
    samples: Samples
    changes: dict[str, Change] | None = None
    rows: list[Row] = field(default_factory=list)
    lock: Any = field(default_factory=RLock)
    runs: bool = False
    copies: weakref.WeakSet[_Copy] = field(default_factory=weakref.WeakSet)

    def __reduce__(self) -> Any:
        return _record, (self.key, self.title, self.samples)

    def decide(
        self,
        owner: _Copy,
        model: nn.Module,
        given: Given,
    ) -> None:
        """Decides for all copies, with ``model``, that of ``owner``, as it runs on these
        arguments."""
        with self.lock, kept():
            if self.runs:
                return  # in a pass of this thread
            if self.changes is None:
                self.runs = True
                try:
                    decision = decide(model, given, self.title)
                finally:
                    self.runs = False
                self.rows = decision.rows
                self.changes = self._changes(decision, owner, model)
            for each in list(self.copies):
                if each is owner or each.followed() is self:
                    each.finish(self.changes)

    def _changes(
        self, decision: Decision, owner: _Copy, model: nn.Module
    ) -> dict[str, Change]:
        name_of = {id(p): name for name, p in model.named_parameters()}
        changes = {}
        for path, module in model.named_modules():
            hooks = list(_hooks_of(module, self))
            for hook in hooks or [_Hook(owner, f"+{path}", module)]:
                for name, parameter in hook.parameters(module):
                    changes[name] = decision.changes[name_of[id(parameter)]]
        return changes


_RECORDS: weakref.WeakValueDictionary[str, Record] = weakref.WeakValueDictionary()


def _record(key: str, title: str, samples: Samples) -> Record:
    """The record of a key in this process."""
    record = _RECORDS.get(key)
    if record is None:
        record = _RECORDS[key] = Record(key, title, samples)
    return record


class _Copy:
    """A copy of the model, or of a part. hooks: those of its modules. loaded: plain values of
    other models that it has loaded."""

    def __init__(self, record: Record, loaded: Iterable[_Sample | None] = ()) -> None:
        self.record = record
        self.loaded = [*loaded]
        self.hooks: list[_Hook] = []
        record.copies.add(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Copy:
        memo[id(self)] = made = _Copy(self.record, self.loaded)
        return made

    def __reduce__(self) -> Any:
        return _Copy, (self.record, self.loaded)

    def followed(self) -> Record:
        """The record of the model that all plain values are of, which it becomes a copy of."""
        pending = chain.from_iterable(map(_Hook.pending, self.hooks))
        values = {name: _sample(parameter) for name, parameter in pending}

        def is_of(record: Record) -> bool:
            samples = record.samples
            return all(s and s.equals(samples.get(name)) for name, s in values.items())

        latest = reversed([*_RECORDS.values(), self.record])
        for record in filter(is_of, latest):
            self.record.copies.discard(self)
            record.copies.add(self)
            self.record = record
            break
        return self.record

    def is_plain(self, parameter: Tensor) -> bool:
        """Whether a parameter has plain values of any model. Constants may be anyone's."""
        sample = _sample(parameter)
        if sample is None or len(sample.values.unique()) < 2:
            return False
        known = (record.samples.values() for record in _RECORDS.values())
        return any(map(sample.equals, chain(self.loaded, *known)))

    def finish(self, changes: Mapping[str, Change]) -> None:
        """Sets the values of all modules and removes their hooks."""
        written: dict[str, bool] = {}  # name -> whether its size is not that decided on
        unknown: dict[str, nn.Parameter] = {}
        is_any_set = False
        # One by one: a parameter of two modules is pending in the first.
        for name, parameter in chain.from_iterable(map(_Hook.pending, self.hooks)):
            change = changes.get(name)
            sample = self.record.samples.get(name)
            if change is None:
                unknown[name] = parameter
                continue
            # `set_depth` may have come before.
            depth = tags_of(parameter).mup_scaling_depth
            depth = depth or change.tags.mup_scaling_depth
            retag(parameter, change.tags._replace(mup_scaling_depth=depth))
            if sample and not (sample.is_of(parameter) or self.is_plain(parameter)):
                if change.tags.mup_divisor:
                    octaves = math.log2(rms_of(parameter) / change.tags.mup_scale)
                    written[name] = abs(octaves) > REACH
            elif change.is_set:
                is_any_set = True
                change.apply(parameter)
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()
        self._warn_of_written(written, is_any_set)
        self._leave(unknown)

    def _leave(self, unknown: Mapping[str, nn.Parameter]) -> None:
        """Leaves parameters as they are that the model that was decided on does not have."""
        left = {name: p for name, p in unknown.items() if tags_of(p).mup_pending}
        for parameter in left.values():
            retag(parameter, tags_of(parameter)._replace(mup_pending=False))
        if left:
            warn_once(
                ScaleWarning,
                f"{len(left)} parameters (as {next(iter(left))}) of a copy of a model of "
                "unit_scale keep their values: the copy that ran first does not have them. Edit "
                "a model after its first call, or pass batch= to unit_scale",
                key=f"{self.record.key} left",
            )

    def _warn_of_written(
        self,
        written: Mapping[str, bool],
        others: bool,
    ) -> None:
        """Warns if weights that were written leave the model unscaled or half scaled. others:
        whether other parameters have been multiplied."""
        far = [name for name, is_far in written.items() if is_far]
        if written and (others or 2 * len(far) > len(written)):
            name = (far or list(written))[0]
            how = "half scaled" if others else "not unit-scaled"
            warn_once(
                ScaleWarning,
                f"{len(written)} weights (as {name}) were written after unit_scale(model) and "
                f"before its first call: they keep these values, and the model is {how}. Pass "
                "batch= to unit_scale, so that values are set before others are loaded",
                key=f"{self.record.key} {name}",
            )


class _Hook:
    """The forward pre-hook of a module. path: of the module when the model became pending."""

    def __init__(
        self,
        owner: _Copy,
        path: str,
        module: nn.Module | None,
    ) -> None:
        self.owner = owner
        self.path = path
        self.module: Callable[[], nn.Module | None] = lambda: None
        if module is not None:
            self.join(module)

    def join(self, module: nn.Module) -> None:
        """Makes ``module`` the one that has this hook."""
        if self.module() is None:
            self.owner.hooks.append(self)
        self.module = weakref.ref(module)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        return _Hook(
            copy.deepcopy(self.owner, memo), self.path, memo.get(id(self.module()))
        )

    def __reduce__(self) -> Any:
        return _Hook, (self.owner, self.path, None)

    @property
    def __name__(self) -> str:  # of functions; TorchScript reads it
        raise AttributeError(
            f"{PENDING}: call it once, or pass batch= to unit_scale, before that"
        )

    def parameters(self, module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        """The module's own parameters with their keys in the record."""
        return module.named_parameters(prefix=self.path, recurse=False)

    def pending(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the parameters whose values are not set, by name."""
        module = self.module()
        if module is None:
            return
        for name, parameter in self.parameters(module):
            if tags_of(parameter).mup_pending or not has_parameter_data(parameter):
                yield name, parameter

    def remove(self) -> None:
        """Removes the hook from its module."""
        module = self.module()
        if module is None:
            return
        is_root = not self.path
        remember_tags(module, recurse=is_root)
        if is_root:
            DECIDED[module] = self.owner.record
            REPORTS[module] = Report(self.owner.record.rows, heading="parameter")
        for hooks in (
            module._forward_pre_hooks,
            module._state_dict_hooks,
            module._load_state_dict_pre_hooks,
        ):
            for key in [key for key, hook in hooks.items() if _is_of(hook, self)]:
                del hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)

    def __call__(
        self,
        module: nn.Module,
        args: Args,
        kwargs: Kwargs,
    ) -> None:
        _before_call(self, module, args, kwargs)


def _is_of(hook: Any, owner: _Hook) -> bool:
    """Whether a hook is ``owner``, or has it. torch wraps those that load."""
    hook = getattr(hook, "hook", hook)
    return hook is owner or (isinstance(hook, partial) and owner in hook.args)


def _after_save(
    hook: _Hook, module: nn.Module, state: Any, prefix: str, metadata: Any
) -> None:
    """Marks values as plain, unless others have been written."""
    samples = hook.owner.record.samples
    for name, parameter in hook.parameters(module):
        sample = samples.get(name)
        if sample is None or not sample.is_of(parameter):
            return
    metadata[METADATA] = "plain"


def _before_load(
    hook: _Hook, module: nn.Module, state: Any, prefix: str, metadata: Any, *_: Any
) -> None:
    """Remembers the plain values of another model, which may be of another process."""
    if METADATA in metadata:
        keys = {prefix + leaf for leaf in own_parameters(module)}
        hook.owner.loaded += [_sample(state[key]) for key in keys.intersection(state)]


PENDING = "unit_scale(model) sets the values of the model in its first call"


def _running(
    hook: _Hook,
    module: nn.Module,
    args: Args,
    kwargs: Kwargs,
) -> None:
    record = hook.owner.record
    if in_shape_inference() or (hook.path and record.runs):
        return
    if "parametrizations" in hook.path.split("."):
        return  # who reads a weight that a parametrization computes runs no part of the model
    if hook.path:
        warn_once(
            ScaleWarning,
            f"{hook.path} runs before the model that unit_scale(model) returned has run as a "
            f"whole: {PENDING}, and this part has plain values until then. Pass batch= to "
            "unit_scale, or transform the part that is called",
            key=record.key,
        )
        return
    for part in module.modules():
        for each in _hooks_of(part, record):
            each.join(part)  # those of a pickle do not know it
    # A model around this one may be tracked.
    with framed(observer=False):
        if not record.runs:
            _check(module, (args, kwargs))
            record = hook.owner.followed()
        record.decide(hook.owner, module, (args, kwargs))


def _hooks_of(module: nn.Module, record: Record) -> Iterator[_Hook]:
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, _Hook) and hook.owner.record is record:
            yield hook


_before_call = untraced(
    _running,
    f"{PENDING}: call it once, or pass batch= to unit_scale, before fullgraph=True",
)


def _check(model: nn.Module, given: Given) -> None:
    """Raises RuntimeError for a first call without values or with others than the parameters'."""
    parts = list(model.modules())
    held = [t for part in parts for _, t in tensors_in(part._parameters)]
    tensors = held + [t for _, t in tensors_in(given)]
    replaced = not all(isinstance(p, nn.Parameter) for p in held)
    tagged = any(getattr(part, "mup_tags", None) for part in parts)
    first = next(iter(model._forward_pre_hooks.values()))
    what = ""
    if torch.compiler.is_exporting():
        what = "torch.export"
    elif torch.jit.is_tracing():  # type: ignore[attr-defined, unused-ignore]
        what = "torch.jit.trace"
    elif (replaced and tagged) or getattr(model, "_is_replica", False):
        what = (
            "torch.func.functional_call or DataParallel, which replace its parameters"
        )
    elif any(t.is_meta for t in tensors):
        what = "a call on the meta device, which has no values"
    elif is_in_fsdp(model) and not isinstance(first, _Hook):
        what = "fully_shard, or call unit_scale after that"
    elif not has_values(tensors):
        what = "torch.vmap, which hides values"
    if what:
        raise RuntimeError(
            f"{PENDING}: call it once, or pass batch= to unit_scale, before {what}"
        )


def pend(model: nn.Module) -> None:
    """Makes ``model`` pending. Its parameters have tags, with kinds and without numbers."""
    starts = starts_of(model)
    samples = {n: _sample(p) for n, p in model.named_parameters(remove_duplicate=False)}
    # Processes transform their models in one order, and may call them in others.
    owner = _Copy(_record(uuid.uuid4().hex, model_name(samples), samples))
    for name, parameter in model.named_parameters():
        if name in starts:
            retag(parameter, starts[name].tags._replace(mup_pending=True))
    remember_tags(model)
    for path, module in model.named_modules():
        hook = _Hook(owner, path, module)
        # First: one before it is of fully_shard, which has divided the model since.
        module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
        module.register_state_dict_post_hook(partial(_after_save, hook))
        module.register_load_state_dict_pre_hook(partial(_before_load, hook))


def set_values(model: nn.Module, given: Given) -> None:
    """Sets the values of the parameters of ``model``, in place, as it runs on these arguments, and
    tags them."""
    decision = decide(
        model, given, model_name(name for name, _ in model.named_parameters())
    )
    for name, parameter in model.named_parameters():
        change = decision.changes[name]
        retag(parameter, change.tags)
        change.apply(parameter)
    remember_tags(model)
    REPORTS[model] = Report(decision.rows, heading="parameter")


def is_pending(model: nn.Module) -> bool:
    """Whether `unit_scale` will set the values of ``model`` in its first call."""
    return any(tags_of(p).mup_pending for p in model.parameters())


def is_unit_scaled(model: nn.Module) -> bool:
    """Whether `unit_scale` has set the values of ``model``, or will."""
    return any(tags_of(p).mup_divisor for p in unwrapped(model).parameters())
