"""`swap`: the one walk over a model that replaces layers by those of another library."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from torch import nn
from torch.nn.parameter import is_lazy

from ..common.mixin import Gained, bare_class
from ..common.pitfalls import ConvertWarning, warn_once
from ..common.report import LEFT_ALONE, Report, Row

__all__ = [
    "Adapted",
    "Make",
    "Where",
    "adapted",
    "forget",
    "inside_attention",
    "is_replacement",
    "shared",
    "swap",
    "warn_nothing",
    "why_not_exact",
    "why_quantized",
]

Where = Callable[[str, nn.Module], bool]

Make = Callable[[str, nn.Module], "nn.Module | str | None"]
"""(name, module) -> its replacement; or why it stays; or None, for what is no concern of it."""

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_CARRIED = "fp8_carried"
_ADAPTED = "fp8_adapted"


class Adapted(NamedTuple):
    """What a model whose layers were replaced remembers: by which adapter, and the report."""

    adapter: str
    report: Report[Row]


def adapted(model: nn.Module) -> Adapted | None:
    """What `swap` noted on ``model``, or None."""
    return vars(model).get(_ADAPTED)


def is_replacement(module: nn.Module) -> bool:
    """Whether `swap` put ``module`` where it is, for an adapter."""
    return _CARRIED in vars(module)


def forget(model: nn.Module) -> None:
    """Drops that note from ``model`` and everything in it."""
    for module in model.modules():
        vars(module).pop(_ADAPTED, None)


def swap(model: nn.Module, make: Make, *, adapter: str = "", how: str = "") -> nn.Module:
    """Replaces every module that ``make`` has a replacement for, under all names that it has.

    The replacement gets the parameters of the old module themselves, not copies: ties, dtype,
    device, requires_grad and what an optimizer holds stay as they are, and no memory is used. It
    gets its hooks (their handles keep working), its train flag, and the attributes that it has none
    of. Returns the model; where the model itself is replaced, its replacement.

    adapter: whose layers they are: the model is marked as `adapted`, with a row for each module
    that ``make`` had an answer for. "" is for the way back: attributes are given back, and no more.
    how: what the rows of the replaced say.
    """
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
        rows.append(Row(name, kind, "converted", how))
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if name and id(module) in replacements:
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, replacements[id(module)])
    model = replacements.get(id(model), model)
    if adapter:
        vars(model)[_ADAPTED] = Adapted(adapter, Report(rows))
        if not replacements:
            warn_nothing(model, rows)
    return model


def warn_nothing(model: nn.Module, rows: Iterable[Row]) -> None:
    """Warns that no layer of ``model`` was chosen and converted. rows: of its report."""
    whys = Counter(row.why for row in rows if row.left_alone or row.why)
    found = "; ".join(f"{why} ({count})" for why, count in whys.most_common())
    warn_once(
        ConvertWarning,
        f"no layer of the {bare_class(model).__name__} was chosen and converted. Its layers: "
        f"{found or 'none has a weight'}. A where= is called as where(name, layer), with names "
        "as in fp8.report(model)",
        model,
    )


def _take_over(new: nn.Module, old: nn.Module, *, carry: bool) -> None:
    for name, parameter in old.named_parameters(recurse=False):
        setattr(new, name, parameter)
    hooks = {key for key in _OF_EVERY_MODULE if "hook" in key}
    vars(new).update({key: vars(old)[key] for key in hooks & vars(old).keys()})
    new.training = old.training
    names = vars(old).keys() - vars(new).keys() if carry else vars(old).get(_CARRIED, ())
    vars(new).update({name: vars(old)[name] for name in names})
    if carry:
        vars(new)[_CARRIED] = tuple(sorted(names))


def inside_attention(model: nn.Module) -> dict[int, str]:
    """id of each module that an nn.MultiheadAttention holds and never calls -> the name of that."""
    return {
        id(part): name or type(module).__name__
        for name, module in model.named_modules()
        if isinstance(module, nn.MultiheadAttention)
        for part in module.children()
    }


def shared(model: nn.Module) -> set[int]:
    """The ids of the modules that have more than one name."""
    names = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    return {key for key, count in names.items() if count > 1}


def why_not_exact(module: nn.Module, kinds: Sequence[type[nn.Module]]) -> str:
    """Why a module that is one of the ``kinds`` that are replaced, or a subclass of one, stays; ""
    for one that may be replaced."""
    if type(module) in kinds:
        return why_quantized(module)
    if isinstance(module, Gained):
        return "transformed: its scales would be lost"
    return why_quantized(module) or "a subclass: its forward may be its own"


_QUANTIZERS = ("bitsandbytes", "torchao")
"""Libraries whose classes of parameters hold codes, whatever dtype they show."""


def why_quantized(module: nn.Module) -> str:
    """Why the weights of a layer are codes, which nothing here can scale or cast; "" if none is."""
    for parameter in module.parameters(recurse=False):
        kind = type(parameter)
        library = kind.__module__.partition(".")[0]
        if library in _QUANTIZERS:
            return f"quantized: its weight is a {kind.__name__} of {library}"
        if not is_lazy(parameter) and parameter.dim() > 1 and parameter.element_size() == 1:
            return f"quantized: its weight is {parameter.dtype}"
    return ""
