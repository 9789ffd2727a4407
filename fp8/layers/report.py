"""`report`: what was done to each layer of a model, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from torch import nn

from ..casts.scaled_tensor import ScaledTensor
from ..common.mixin import bare_class
from ..common.report import CHANGES, LEFT_ALONE, Report, Row, notes_on
from ..common.validation import check_module
from ..kernels.product import needs, why_not_here, why_not_recipe
from ..recipes.policy import name_of
from ..recipes.recipe import AUTO, STATIC
from ..torch_internals import Layer
from ..warnings import ConvertWarning, show
from .adapters import adapted
from .select import has_size, is_unit_scaled, layers_of
from .settings import Converted, policy_of


def report(model: nn.Module) -> Report[Row]:
    """Lists every layer with a weight: converted, and to which recipe, or left alone, and why. If
    norms are in low precision, lists every norm as well.

    Args:
        model: a model, converted or not.

    Returns:
        A report with one row per layer. A layer with several names appears under the first.
    """
    check_module("report", model)
    note = adapted(model)
    others = [row for c in CHANGES for row in c.rows(model)]
    if note is not None:
        return Report([*note.report, *others], notes_on(model))
    notes = [*notes_on(model)]
    policy = policy_of(model)
    starts = [
        f"{name_of(to)} from {start:g} of the training" for start, to in policy.switch
    ]
    if policy.name or starts:
        name = f"policy {policy.name!r}" if policy.name else "policy"
        notes.append("; ".join([name, *starts]))
    return Report([*rows_of_layers(model), *others], notes)


def rows_of_layers(model: nn.Module) -> list[Row]:
    """A row for each layer with a weight, in the order of the model."""
    rows = []
    for name, module, why_not in layers_of(model):
        kind = bare_class(module).__name__
        if isinstance(module, Converted):
            rows.append(Row(name, kind, "converted", _how(module)))
        else:
            why = why_not or vars(module).get("fp8_why") or _why_unchosen(module)
            rows.append(Row(name, kind, LEFT_ALONE, why))
    return rows


def _why_unchosen(module: nn.Module) -> str:
    weight = vars(module)["_parameters"].get("weight")
    if isinstance(weight, ScaledTensor) and not weight.requires_grad:
        return f"frozen: its weight is stored in {weight.format}, its products are not cast"
    return "not chosen"


def _how(layer: Converted) -> str:
    """The recipe of a converted layer, what decided, and what computes its products."""
    settings = layer.fp8_settings
    whys = [_of_auto(layer), settings.why, settings.since]
    why = "; ".join(filter(None, whys))
    name = settings.recipe.name + (f" ({why})" if why else "")
    return name + _runs(layer)


def _of_auto(layer: Layer) -> str:
    """What "auto" has found in a layer whose recipe it chose."""
    settings = layer.fp8_settings
    if AUTO not in settings.sources or settings.since:
        return ""
    if is_unit_scaled(layer) or has_size(layer):
        return f"{AUTO}: unit-scaled"
    if settings.recipe == STATIC:
        return f"{AUTO}: calibrated"
    return f"{AUTO}: not unit-scaled"


def _runs(layer: Layer) -> str:
    """What computes the products of a layer, or is predicted to; "" if simulation was asked for."""
    settings = layer.fp8_settings
    if settings.backend == "simulate":
        none = "" if settings.asked == "simulate" else why_not_recipe(settings.recipe)
        if none:
            return f", simulated: {none}"
        return ""
    if not (isinstance(layer, nn.Linear) or settings.is_transposed):
        return ", simulated: the kernels multiply two matrices"
    weight = layer.weight
    multiple, devices = needs(settings.recipe)
    for size in reversed(weight.shape):
        if size % multiple:
            return f", simulated: {size} is no multiple of {multiple}"
    if settings.backend == "auto" and weight.device.type != "cuda":
        return f", native on {devices}"
    why = why_not_here(settings.recipe, weight.device, weight.dtype)
    if why:
        return f", simulated: {why}"
    return ", native"


def warn_nothing(
    model: nn.Module,
    rows: Iterable[Row],
    done: str = "converted",
) -> None:
    """Warns that no layer of ``model`` was chosen and converted, at each call: the one before may
    have had another where=. rows: the rows of its report. done: what was asked for."""
    whys = Counter(row.why for row in rows if row.left_alone or row.why)
    reasons = "; ".join(f"{why} ({count})" for why, count in whys.most_common())
    show(
        ConvertWarning,
        f"no layer of the {bare_class(model).__name__} was chosen and {done}. Its layers: "
        f"{reasons or 'none has a weight'}. A where= is called as where(name, layer), with names "
        "as in fp8.report(model)",
    )
