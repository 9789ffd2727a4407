"""`swap`: replaces layers of a model with layers of another library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..common.mixin import Args, Forward, Mixin, bare_class
from ..common.report import LEFT_ALONE, Report, Row
from ..torch_internals import Keywords
from .adapters import ADAPTED, CARRIED, Adapted
from .report import warn_nothing
from .select import Where, check_values_set, inside_attention, why_quantized

Make = Callable[[str, nn.Module], "nn.Module | str | None"]
"""(name, module) -> its replacement; the reason why it stays; or None, if it is not concerned."""

_HOOKS = frozenset(key for key in vars(nn.Module()) if "hook" in key)


def swap(
    model: nn.Module,
    make: Make,
    *,
    adapter: str = "",
    how: str | Callable[[str], str] = "",
) -> nn.Module:
    """Replaces every module for which ``make`` returns a replacement, under all its names.

    The replacement gets the parameters of the old module, not copies, its hooks (their handles keep
    working), the training flag, and the attributes that it lacks. Returns the model, or its
    replacement if the model itself is replaced.

    adapter: the library of the new layers. The model is marked as `adapted`, with a row for each
    module for which ``make`` returns an answer. "" reverts: only the attributes are given back, and
    the records are removed. how: the reason in the row of a replaced module, or a function of its
    name.
    """
    if adapter:  # the calls inside of its layers are not seen when the values are set
        check_values_set(f"the conversion to layers of {adapter}", model)
    replacements: dict[int, nn.Module] = {}
    rows = []
    for name, module in list(model.named_modules()):
        answer = make(name, module)
        if answer is None:
            continue
        kind = bare_class(module).__name__
        if isinstance(answer, str):
            rows.append(Row(name, kind, LEFT_ALONE, answer))
            continue
        _take_over(answer, module, carry=bool(adapter))
        replacements[id(module)] = answer
        rows.append(Row(name, kind, "converted", how(name) if callable(how) else how))
    # Under all names of a module, so that it stays shared.
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if name and id(module) in replacements:
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, replacements[id(module)])
    model = replacements.get(id(model), model)
    if not adapter:
        for module in model.modules():
            vars(module).pop(ADAPTED, None)
            vars(module).pop(CARRIED, None)
    else:
        vars(model)[ADAPTED] = Adapted(adapter, Report(rows))
        if not replacements:
            warn_nothing(model, rows)
    return model


def _take_over(new: nn.Module, old: nn.Module, *, carry: bool) -> None:
    # Not copies: an optimizer steps them.
    for name, parameter in old.named_parameters(recurse=False):
        setattr(new, name, parameter)
    new.training = old.training
    names = vars(old).keys() - vars(new).keys() if carry else vars(old).get(CARRIED, ())
    vars(new).update({name: vars(old)[name] for name in (*_HOOKS, *names)})
    if carry:
        vars(new)[CARRIED] = tuple(sorted(names))


def layers_for(
    model: nn.Module,
    kinds: tuple[type[nn.Module], ...],
    where: Where | None,
    make: Callable[[nn.Module], nn.Module | str],
    other: str,
) -> Make:
    """A `Make` of a library that replaces layers of exactly ``kinds``. make: the replacement, or
    why the layer stays. other: why layers with a matrix of other kinds stay."""
    owners = inside_attention(model)

    def replacement(name: str, module: nn.Module) -> nn.Module | str | None:
        if not isinstance(module, kinds):
            if any(p.dim() > 1 for p in module.parameters(recurse=False)):
                return other
            return None
        if id(module) in owners:
            return f"computed by {owners[id(module)]}"
        if where is not None and not where(name, module):
            return "not chosen"
        if isinstance(module, Mixin):
            return "transformed: its casts and functions would be lost"
        why = why_quantized(module)
        if not why and type(module) not in kinds:
            why = "a subclass: its forward may be its own"
        return why or make(module)

    return replacement


def why_not_fit(module: nn.Module, multiple: int) -> str:
    """Why kernels for sizes that are multiples of ``multiple`` do not take a layer, or ""."""
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    if weight is None:
        return "its weight is computed, not a parameter"
    odd = [size for size in weight.shape if size % multiple]
    if odd and isinstance(module, nn.Linear):
        return f"{odd[0]} is no multiple of {multiple}"
    return ""


class Padded(Mixin):
    """A linear layer that fills up its input with copies of the last row, to the multiple that its
    kernels need."""

    fp8_multiple: int

    def around(self, forward: Forward, args: Args, kwargs: Keywords) -> Any:
        input, *others = args
        short = -(input.numel() // max(input.shape[-1], 1)) % self.fp8_multiple
        if not short:
            return forward(*args, **kwargs)
        rows = input.reshape(-1, input.shape[-1])
        # Copies change no largest magnitude, and so no scale; detached ones no gradient.
        rows = torch.cat([rows, rows[-1:].detach().expand(short, -1)])
        output = forward(rows, *others, **kwargs)[:-short]
        return output.reshape(*input.shape[:-1], output.shape[-1])
