"""`convert` and `revert`: the layers of a model run under a recipe, and stop doing so."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from ..casts.casting import is_whole
from ..casts.counts import forget_looks
from ..common.compiler import FIRST_LOOK
from ..common.mixin import Gained, bare_class, check_module, check_not_scripted, gain, lose
from ..common.pitfalls import RecipeWarning, warn_once
from ..common.report import LEFT_ALONE, Report, Row, notes_on
from ..context.activation_checkpointing import in_recomputation
from ..context.active import ACTIVE, checked_backend
from ..formats.quantize import is_dense
from ..modes.autocast import autocast
from ..native.product import alignment, devices, why_not_here, why_not_recipe
from ..products.matmul import linear
from ..recipes.history import LayerHistory, begin_anew, forget, has_scales, remember, settle
from ..recipes.recipe import AUTO, PLAIN, STATIC, UNIT, Recipe, given_recipe, needs_unit_scale
from .swap import (
    Where,
    adapted,
    inside_attention,
    is_replacement,
    warn_nothing,
    why_quantized,
)
from .where import checked_where, choose

__all__ = [
    "LAYERS",
    "auto_recipe",
    "check_ready",
    "choose_recipes",
    "choose_static",
    "convert",
    "is_transposed",
    "report",
    "revert",
]

M = TypeVar("M", bound=nn.Module)

LAYERS: tuple[type[nn.Module], ...] = (
    nn.Linear,
    nn.Bilinear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.MultiheadAttention,
)
"""What is converted, with its subclasses: layers whose work is a product with a weight."""

ACTIVATIONS: tuple[type[nn.Module], ...] = (nn.GELU, nn.SiLU, nn.GLU, nn.ReLU)
"""What is converted besides, with its subclasses, where the recipe has `saved_activations`."""

_NOT_A_PRODUCT = "a lookup, not a product"
_KERNEL = "one kernel computes all its products"

EXCEPTIONS: dict[type[nn.Module], str] = {
    nn.Embedding: _NOT_A_PRODUCT,
    nn.EmbeddingBag: _NOT_A_PRODUCT,
    nn.RNNBase: _KERNEL,
    nn.RNNCellBase: _KERNEL,
}
"""Layers with a weight that are never converted -> why."""

_TWO_AXES = "it sums over two axes, and the recipe has scales along one"
_NO_BUFFERS = "more than one product, and the recipe keeps a history of each"
_MORE_KEYS = "add_bias_kv and add_zero_attn are not supported"
_PATCHED = "its forward was replaced on the instance: convert the model before that"

_SET = tuple(
    f"fp8_{name}"
    for name in ("recipe", "given", "asked", "backend", "why", "transposed", "multiple", "ragged")
)
"""What `convert` sets on a layer, besides its class and buffers."""

# In evaluation these compute their whole forward in one kernel that reads the weights of their
# layers, which then do not run. Under a mode they do not; a block that is not enabled is one.
_FAST_PATHS = (nn.TransformerEncoder, nn.TransformerEncoderLayer)


ADAPTERS = ("transformer_engine", "torchao")
"""Backends that are other libraries, which put layers of their own into the model."""


def adapter(name: str) -> Any:
    """The module of `fp8.adapters` for a backend of ADAPTERS, imported when it is asked for."""
    return importlib.import_module(f"fp8.adapters.{name}")


class _Converted(Gained):
    """A layer whose products run under its ``fp8_recipe``."""

    fp8_recipe: Recipe
    #: What `convert` was given: that recipe, or None for "auto".
    fp8_given: Recipe | None
    fp8_asked: str
    #: "simulate" where another was asked for, and the recipe has no kernels.
    fp8_backend: str
    #: Why it does not have the recipe of the chosen layers.
    fp8_why: str
    fp8_transposed: bool
    #: What its kernels want sizes to be multiples of.
    fp8_multiple: int
    #: The last number of tokens seen in eager mode that the kernels do not take.
    fp8_ragged: int

    def around(self: Any, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        history = LayerHistory(self) if self.fp8_recipe.keeps_history else None
        if self.fp8_recipe.changes_scales and in_recomputation():
            raise NotImplementedError(_RECOMPUTED.format(self.fp8_recipe.name))
        # A linear layer needs no mode, unless another wants to see its call: that is quicker, and
        # it may be compiled inside of a checkpoint.
        alone = history is None and self._active == (_Converted,) and not FIRST_LOOK.items
        if alone and _is_a_tensor(*args, **kwargs):
            if self._original is nn.Linear:
                return _linear(self, self.weight, *args)
            if self.fp8_transposed:
                return _linear(self, self.weight.mT, *args)
        mode = autocast(self.fp8_recipe, backend=self.fp8_backend, history=history)
        mode.reenters = True  # with each call of the layer
        with mode:
            return forward(*args, **kwargs)

    def _load_from_state_dict(self: Any, state_dict: Any, prefix: str, *args: Any) -> None:
        if any(key.startswith(prefix + "fp8_scale_") for key in state_dict):
            _choose_static(self)
        begin_anew(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)  # type: ignore[misc]
        settle(self)

    def extra_repr(self) -> str:
        own = super().extra_repr()  # type: ignore[misc]
        return f"{own}, fp8={self.fp8_recipe.name}" if own else f"fp8={self.fp8_recipe.name}"


_RECOMPUTED = (
    "recipe {!r} cannot be checkpointed with use_reentrant=False: what is recomputed would have "
    'other scales, as scaling "delayed" has moved on'
)


def _is_a_tensor(*args: Any, **kwargs: Any) -> bool:
    """Whether it is one tensor, by position, that is not sparse. Torch has all else."""
    one = len(args) == 1 and not kwargs and isinstance(args[0], Tensor)
    return one and args[0].layout == torch.strided


def _linear(layer: Any, weight: Tensor, input: Tensor) -> Tensor:
    if layer.fp8_backend != "simulate" and not torch.compiler.is_compiling():
        tokens = input.shape[:-1].numel()
        if tokens % layer.fp8_multiple:
            vars(layer)["fp8_ragged"] = tokens
    given = {"recipe": layer.fp8_recipe, "backend": layer.fp8_backend}
    return linear(input, weight, layer.bias, **given)


class _Expanded(Gained):
    """A container that calls its layers, in evaluation too."""

    def around(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        with nullcontext() if ACTIVE.blocks else autocast(enabled=False):
            return forward(*args, **kwargs)


def convert(
    model: M,
    recipe: str | Recipe = AUTO,
    *,
    backend: str = "auto",
    where: str | Where | None = None,
    rest: str | Recipe | None = None,
) -> M:
    """Has the layers of ``model`` compute their products under ``recipe``; returns ``model``.

    The layers (`LAYERS`) are converted in place and stay what they are: the same parameters, tied
    or shared or frozen as they were, the same names, dtype, device, hooks and type, so that
    optimizers, checkpoints and `isinstance` see the model that they know. A model converted
    before gets the new recipe. `report` has one row for each layer, converted or not, and why;
    `revert` undoes it.

    recipe: a name in `fp8.RECIPES` or a `Recipe`; or "auto": "unit" for each layer that is
    unit-scaled (of `unit_scaling.modules`, or in a model of `unit_scale`, before or after this, but
    with init="preserve"), "tensor" for each that is not, or "static" once `fp8.calibrate` has set
    its scales. Layers of other libraries have "tensor".
    backend: as in `fp8.autocast`. Convolutions, recipes and weights of sizes that the kernels do
    not take are simulated; a number of tokens that is no multiple of 16 (of 32 under MX and NVFP4,
    128 under "block") is filled up with zeros. The report says both, the latter once it was seen
    in eager mode, on whatever device the model is, and why kernels of this device are not used.
    Or "transformer_engine" or "torchao", whose layers take the place of those of the model
    (`fp8.adapters`); a model that is itself a layer is replaced by what is returned.
    where: (name, layer) -> whether to convert it, a bool; or by name one of
    `fp8.surgery.where.WHERE`: "hidden", the layers of the blocks that the model repeats, and
    "umup", those but the ones that join the residual stream. None converts every layer. A function
    of (module, name), as torchao's filters are, is understood by its annotations or by the names of
    its arguments. rest: the recipe of the layers that ``where`` leaves alone, simulated where it
    has no kernels; None leaves them as they are. ``convert(model, "unit", where="umup",
    rest="bf16")`` is the scheme of u-muP.

    A recipe with scaling "delayed" keeps its history in buffers of the layer, ``fp8_amax_input``,
    ``fp8_amax_weight`` and ``fp8_amax_grad``, which are in the model's state_dict, newest entry
    first: what `AmaxHistory` says of passes holds for each call of the layer. A model that is to
    load them is converted first; a state_dict without them loads, and they begin anew.
    Data-parallel processes agree by `fp8.reduce_amax`. Checkpointing such a layer with
    ``use_reentrant=False`` raises NotImplementedError.

    One with scaling "static" keeps three scales so, ``fp8_scale_input`` and so on, 0 where it has
    none yet. `fp8.calibrate` sets them; else the first training step does. Checkpointing such a
    layer is supported.

    With a recipe that has `saved_activations` the modules of activations (`ACTIVATIONS`) are
    converted as well; a gate that is no module keeps its factors as torch does.
    Products that are no layer's (attention, `@`) stay in high precision: `fp8.autocast` around
    the call of the model is for those.
    Warns with `RecipeWarning` where a recipe without scales ("unit") is given by name to layers
    that are not unit-scaled, with `ConvertWarning` where no layer is chosen and converted.
    Raises TypeError for what is not a module or is TorchScript, and where ``where`` gives no bool;
    ValueError for an unknown recipe, backend or where, for a lazy layer that has no weight yet, for
    "native" with a recipe that has no kernels, and for ``rest`` with the layers of another library.

    >>> import torch, fp8
    >>> model = fp8.convert(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()))
    >>> print(fp8.report(model))
    module  type    done       why
    0       Linear  converted  tensor (auto: not unit-scaled), simulated: 4 is no multiple of 16
    <BLANKLINE>
    1 converted
    """
    check_module("convert", model)
    check_ready(model)
    given, where = given_recipe(recipe), checked_where(where)
    others = None if rest is None else given_recipe(rest)
    if backend in ADAPTERS:
        return _adapt(model, given or PLAIN, adapter(backend), where, rest)
    first = checked_backend(backend, given or PLAIN, ADAPTERS)
    second = "simulate" if why_not_recipe(others or PLAIN) else backend
    model = revert(model)
    layers = _candidates(model, given is not None and given.saved_activations is not None)
    left = choose(where, model, layers)
    for name, module in layers.items():
        if name in left and rest is None:
            vars(module)["fp8_why"] = left[name]
            continue
        asked, runs = (others, second) if name in left else (given, first)
        if why := _unfit(module, asked or PLAIN):
            vars(module)["fp8_why"] = why
        else:
            _begin(module, asked, (backend, runs), left.get(name, ""))
    forget_looks(model)
    _warn(model, [name for name in layers if name not in left])
    return expand(model)


def check_ready(model: nn.Module) -> None:
    """Raises TypeError for TorchScript in ``model``, ValueError for a layer without its weight."""
    for name, module in model.named_modules():
        check_not_scripted(name, module)
        if any(map(is_lazy, module.parameters(recurse=False))):
            path = name or type(module).__name__
            raise ValueError(f"{path} has no weight yet: call the model once, then convert it")


def _adapt(model: M, recipe: Recipe, adapter: Any, where: str | Where | None, rest: Any) -> M:
    """`convert` with the layers of another library."""
    if rest is not None:
        raise ValueError(f"rest={rest!r} needs a backend of this library; choose another backend")
    adapter.its_recipe(recipe)  # raises, before anything is changed
    model = revert(model)
    if isinstance(where, str):
        left = choose(where, model, _candidates(model))
        where = lambda name, layer: name not in left  # noqa: E731
    return expand(adapter.convert(model, recipe, where=where))


def _begin(module: nn.Module, given: Recipe | None, backends: tuple[str, str], why: str) -> None:
    recipe = given or auto_recipe(module)
    gain(module, _Converted)
    values = (recipe, given, *backends, why, is_transposed(module), alignment(recipe), 0)
    vars(module).update(zip(_SET, values, strict=True))
    if recipe.keeps_history and not isinstance(module, ACTIVATIONS):
        remember(module, recipe)


def _is_unit_scaled(module: nn.Module) -> bool:
    """As the module itself says: `unit_scaling.parameter.TaggedModule`."""
    return bool(getattr(module, "fp8_unit_scaled", False))


def auto_recipe(module: nn.Module) -> Recipe:
    """What "auto" is for a layer."""
    if _is_unit_scaled(module):
        return UNIT
    return STATIC if has_scales(module) else PLAIN


def choose_recipes(model: nn.Module) -> None:
    """Chooses anew for the layers that were converted under "auto": called by what makes a model
    unit-scaled."""
    for module in model.modules():
        if isinstance(module, _Converted) and module.fp8_given is None:
            vars(module)["fp8_recipe"] = auto_recipe(module)
            if module.fp8_recipe == UNIT:
                forget(module)
    forget_looks(model)


def choose_static(model: nn.Module) -> None:
    """Chooses "static" for the layers that were converted under "auto" and are not unit-scaled:
    called by what calibrates a model."""
    for module in model.modules():
        if isinstance(module, _Converted):
            _choose_static(module)


def _choose_static(module: Any) -> None:
    if module.fp8_given is None and module.fp8_recipe == PLAIN and not _unfit(module, STATIC):
        vars(module)["fp8_recipe"] = STATIC
        remember(module, STATIC)


def _warn(model: nn.Module, chosen: Sequence[str]) -> None:
    """Of layers whose recipe needs unit scaling, and of a conversion without layers. chosen: the
    names that ``where`` has left to the recipe."""
    found: list[tuple[str, Any]] = [
        (name, layer) for name, layer in model.named_modules() if isinstance(layer, _Converted)
    ]
    plain = [
        (name or "(model)", layer.fp8_given.name)
        for name, layer in found
        if layer.fp8_given and needs_unit_scale(layer.fp8_given) and not _is_unit_scaled(layer)
    ]
    if plain:
        name, recipe = plain[0]
        warn_once(RecipeWarning, _NOT_UNIT.format(recipe, len(plain), len(found), name), model)
    if not found or not chosen:
        warn_nothing(model, report(model))


_NOT_UNIT = (
    "recipe {!r}, given by name, casts without scales, and {} of {} converted layers are not "
    'unit-scaled (the first is {!r}): their small weights and gradients become zero. Use "auto" '
    '(the default) or "tensor", or unit_scale the model first'
)


def expand(model: M) -> M:
    """Has the containers with a fast path call those of their layers that were converted."""
    for module in model.modules():
        inner = module.modules()
        if isinstance(module, _FAST_PATHS) and any(map(_runs_in_fp8, inner)):
            gain(module, _Expanded)
    return model


def _runs_in_fp8(module: nn.Module) -> bool:
    return isinstance(module, _Converted) or is_replacement(module)


def revert(model: M) -> M:
    """Takes back what `convert` did, in place; returns ``model``. Weights and state stay.

    Of a single layer that an adapter replaced, the layer in its place is returned.
    """
    check_module("revert", model)
    notes = [note for module in model.modules() if (note := adapted(module))]
    for name in {note.adapter for note in notes}:
        model = adapter(name).revert(model)
    for module in model.modules():
        lose(module, _Expanded)
        if isinstance(module, _Converted):
            lose(module, _Converted)
            forget(module)
        for key in _SET:
            vars(module).pop(key, None)
    return model


def report(model: nn.Module) -> Report[Row]:
    """One row for every layer with a weight: converted, and to which recipe, or left alone and why.

    Of a layer that several names share, the first counts.
    """
    check_module("report", model)
    note = adapted(model)
    if note is not None:
        return Report(note.report.rows, notes_on(model))
    rows = []
    for name, module, why_not in _layers(model):
        kind = bare_class(module).__name__
        if isinstance(module, _Converted):
            rows.append(Row(name, kind, "converted", _how(module)))
        else:
            why = why_not or vars(module).get("fp8_why", "not chosen")
            rows.append(Row(name, kind, LEFT_ALONE, why))
    return Report(rows, notes_on(model))


def _how(module: Any) -> str:
    """The recipe and, unless all is simulated, what computes the products of a converted layer."""
    recipe, backend = module.fp8_recipe, module.fp8_backend
    state = "unit-scaled" if _is_unit_scaled(module) else "not unit-scaled"
    state = "calibrated" if recipe == STATIC else state
    whys = ["" if module.fp8_given else f"{AUTO}: {state}", module.fp8_why]
    why = "; ".join(filter(None, whys))
    name = f"{recipe.name} ({why})" if why else recipe.name
    if isinstance(module, ACTIVATIONS):
        return (
            f"{name}, keeps {'bits' if isinstance(module, nn.ReLU) else recipe.saved_activations}"
        )
    none = "" if module.fp8_asked == "simulate" else why_not_recipe(recipe)
    if backend == "simulate":
        return f"{name}, simulated: {none}" if none else str(name)
    if not isinstance(module, nn.Linear) and not module.fp8_transposed:
        return f"{name}, simulated: the kernels multiply matrices"
    multiple, weight = module.fp8_multiple, module.weight
    odd = [size for size in reversed(weight.shape) if size % multiple]
    if odd:
        return f"{name}, simulated: {odd[0]} is no multiple of {multiple}"
    predicted = backend == "auto" and weight.device.type != "cuda"
    if not predicted and (why := why_not_here(recipe, weight.device, weight.dtype)):
        return f"{name}, simulated: {why}"
    where = f"native on {devices(recipe)}" if predicted else "native"
    tokens = module.fp8_ragged
    ragged = f"; {tokens} tokens filled up to {tokens + -tokens % multiple}" if tokens else ""
    return f"{name}, {where}{ragged}"


def _candidates(model: nn.Module, activations: bool = False) -> dict[str, nn.Module]:
    """Name -> layer, of all that can be converted."""
    return {name: module for name, module, why in _layers(model, activations) if why is None}


def _layers(
    model: nn.Module, activations: bool = False
) -> Iterator[tuple[str, nn.Module, str | None]]:
    """(name, module, why it cannot be converted, or None) for all that have a weight, for what is
    converted and, if asked for, for activations."""
    inside = inside_attention(model)
    for name, module in model.named_modules():
        if isinstance(module, parametrize.ParametrizationList):
            continue  # of the layer that it computes a weight for
        weights = parametrize.is_parametrized(module) or any(
            is_lazy(p) or p.dim() > 1 for p in module.parameters(recurse=False)
        )
        asked = activations and isinstance(module, ACTIVATIONS)
        if weights or asked or isinstance(module, _Converted):
            yield name, module, _why_not(module, inside.get(id(module)))


def _unfit(module: nn.Module, recipe: Recipe) -> str:
    """Why a layer cannot run under this recipe; "" if it can."""
    if isinstance(module, nn.Bilinear) and not is_whole(recipe):
        return _TWO_AXES
    if isinstance(module, nn.MultiheadAttention) and (
        module.bias_k is not None or module.add_zero_attn
    ):
        return _MORE_KEYS
    many = isinstance(module, nn.Bilinear | nn.MultiheadAttention)
    return _NO_BUFFERS if many and recipe.keeps_history else ""


def is_transposed(module: nn.Module) -> bool:
    """Whether it is GPT-2's linear layer, `transformers.pytorch_utils.Conv1D`: weight (in, out)."""
    known = sys.modules.get("transformers.pytorch_utils")
    return known is not None and isinstance(module, known.Conv1D)


def _why_not(module: nn.Module, owner: str | None) -> str | None:
    if owner is not None:
        return f"computed by {owner}"
    if why := why_quantized(module):
        return why
    library = bare_class(module).__module__.partition(".")[0]
    if library in ADAPTERS:
        return f"a layer of {library}, which computes its products"
    for parameter in module.parameters(recurse=False):
        if not is_dense(parameter):
            return f"no recipe casts its weight: {parameter.dtype}, {parameter.layout}"
    if isinstance(module, (*LAYERS, *ACTIVATIONS)) or is_transposed(module):
        return _PATCHED if "forward" in vars(module) else None
    known = (why for kind, why in EXCEPTIONS.items() if isinstance(module, kind))
    return next(known, "its products are its own: run the model under fp8.autocast")
