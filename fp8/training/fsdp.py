"""FSDP2 all-gather of weights in one byte per element: each process sends its shard rounded.

It uses FSDP2's extension point, a tensor subclass.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple, SupportsIndex

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map_only

from ..casts.operands import restored
from ..common.dtensor import as_shard, part_of
from ..common.mixin import bare_class
from ..common.report import LEFT_ALONE, Report, Row
from ..common.validation import check_module
from ..formats.format import get_format
from ..formats.quantize import in_dtype, quantize_operand
from ..layers.report import warn_nothing
from ..layers.select import LAYERS, Where, auto_of, check_values_set, checked_where
from ..layers.settings import converted
from ..recipes import history
from ..recipes.cast import Cast
from ..recipes.recipe import AUTO, Recipe, recipe_unless_auto
from ..recipes.rules import FORM_OF, RULES
from ..recipes.scaling import (
    largest_finite,
    nearest_power,
    scale_of,
    second_moment,
    static_rms,
)

__all__ = ["gather_in_fp8", "update_scales"]

aten = torch.ops.aten

SCALINGS = ("unit", "static", "tensor")
"""The supported scalings of a weight's cast: those that do not depend on the sharding."""


def gather_in_fp8(
    model: nn.Module, recipe: str | Recipe = AUTO, *, where: Where | None = None
) -> Report[Row]:
    """Makes FSDP2 gather the weights of ``model`` in FP8, cast as ``recipe`` casts weights.

    Call it before `fully_shard`:

        model = fp8.convert(model)
        gather_in_fp8(model)
        fully_shard(model)

    The result of a layer under the same recipe is bit for bit that without FSDP2. In the model, its
    state_dict and its optimizer a weight stays a plain tensor or DTensor of its dtype and keeps its
    attributes (the tags of u-muP). NaN stays NaN; Inf becomes NaN if the format has no Inf.

    Args:
        model: changed in place.
        recipe: its weight cast needs a format with a torch dtype and scaling "unit", "static" or
            "tensor". "auto" takes the recipe of each layer, as in `fp8.convert`. In a model
            with converted layers, a weight is sent unrounded if its layer is not converted, if its
            cast cannot be sent, or if the switch of a policy changes it. For "tensor", see
            `update_scales`. A static scale is the scale of the converted layer; one that is not set
            is measured when the weight is first gathered.
        where: (name, layer) -> whether to send the weight in FP8; None: every layer.

    Returns:
        A report with one row for each layer with a weight.

    Warns:
        ConvertWarning: if ``where`` chooses no weight that is sent.

    Raises:
        TypeError: if ``model`` is not a module.
        ValueError: for a recipe, given by name, with another cast, and for a sharded model.
    """
    check_module("gather_in_fp8", model)
    check_values_set("gather_in_fp8", model)
    shared, where = recipe_unless_auto(recipe), checked_where(where)
    if shared is not None and (why := _why_not_sent(shared, has_scale=True)):
        raise ValueError(why)
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"{name} is sharded: call gather_in_fp8 before fully_shard"
            )
    casts = _casts(model, shared, where)
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    rows = []
    for name, cast in casts.items():
        module: Any = model.get_submodule(name)
        kind = bare_class(module).__name__
        if isinstance(cast, str):
            rows.append(Row(name, kind, LEFT_ALONE, cast))
            continue
        if module.weight not in replaced:
            replaced[module.weight] = _wrapped(module.weight, cast)
        module.register_state_dict_post_hook(_as_plain)
        module.weight = replaced[module.weight]
        rows.append(Row(name, kind, f"sent as {cast}"))
    if where is not None and not replaced:
        warn_nothing(model, rows, "sent")
    return Report(rows)


def _casts(
    model: nn.Module, shared: Recipe | None, where: Where | None
) -> dict[str, Cast | str]:
    """Layer with a weight -> the cast as which it is sent, or why it is sent unrounded."""
    recipes = {} if shared is not None else _converted(model)
    casts: dict[str, Cast | str] = {}
    weights: dict[str, int] = {}
    for name, module in model.named_modules():
        weight = dict(module.named_parameters(recurse=False)).get("weight")
        if weight is None or weight.dim() < 2:
            continue
        recipe = shared or (recipes.get(id(module)) if recipes else auto_of(module))
        if not isinstance(module, LAYERS):
            why_not = "its weight is no operand of a product"
        elif (kind := type(weight.detach())) is not Tensor:
            why_not = f"its weight is a {kind.__name__}"
        elif where is not None and not where(name, module):
            why_not = "not chosen"
        else:
            why_not = _why_not_sent(recipe, "fp8_scale_weight" in module._buffers)
        weights[name] = id(weight)
        casts[name] = why_not or recipe.weight  # type: ignore[union-attr, assignment]
    holders = Counter(id(p) for m in model.modules() for p in m._parameters.values())
    senders = Counter((weights[name], cast) for name, cast in casts.items())
    for name, cast in casts.items():
        if (
            isinstance(cast, Cast)
            and holders[weights[name]] != senders[weights[name], cast]
        ):
            casts[name] = "a module that is not sent so shares its weight"
    return casts


def _converted(model: nn.Module) -> dict[int, Recipe | None]:
    """id -> recipe of each layer that `fp8.convert` has converted; None if a switch changes it."""
    recipes: dict[int, Recipe | None] = {}
    for layer in converted(model).values():
        recipes[id(layer)] = None if layer.fp8_settings.switches else layer.fp8_recipe
    return recipes


@torch.no_grad()
def update_scales(model: nn.Module) -> None:
    """Computes the scales of all weights that `gather_in_fp8` sends with one, in one all-reduce.

    Call it after each optimizer step. A weight that was written later, or without it, computes its
    scale when it is gathered, with an all-reduce of its own. Does nothing under "unit".

    Args:
        model: the sharded model.
    """
    shards = [(p, p.to_local()) for p in model.parameters() if isinstance(p, DTensor)]
    scaled = [(p, w) for p, w in shards if isinstance(w, _Weight) and w.cast.rule]
    if not scaled:
        return
    largest = torch.stack([w.largest() for _, w in scaled])
    mesh = scaled[0][0].device_mesh
    for dimension in range(mesh.ndim):
        dist.all_reduce(largest, dist.ReduceOp.MAX, mesh.get_group(dimension))
    for (_, weight), amax in zip(scaled, largest.unbind(), strict=True):
        weight.remember(amax)


def _why_not_sent(recipe: Recipe | None, has_scale: bool) -> str:
    """Why the weight of a layer with this recipe cannot be sent as its cast rounds it, or "".
    has_scale: whether the layer has a buffer of its static scale."""
    if recipe is None:
        return "it computes in high precision, or will after a switch"
    cast = recipe.weight
    dtype = None if cast is None else get_format(cast.format).dtype
    if cast is None or dtype is None or dtype.itemsize > 1:
        return f"recipe {recipe.name!r} has no FP8 dtype for weights, got {cast}"
    if cast.scaling not in SCALINGS:
        return (
            f"recipe {recipe.name!r} has weights with scaling {cast.scaling!r}, which goes along "
            f"what FSDP2 cuts; gather_in_fp8 takes {', '.join(map(repr, SCALINGS))}"
        )
    if cast.scaling == "static" and not has_scale:
        return (
            "a static scale belongs to a converted layer: fp8.convert the model before"
        )
    if cast.rule is not None and RULES[cast.rule].is_simulated:
        return (
            f"rule {cast.rule!r} reads values, of which FSDP2 gives each process a part"
        )
    if cast.is_random or cast.hadamard or recipe.grad_input[1] != cast:
        return (
            f"recipe {recipe.name!r} casts weights anew for each product; what is gathered is one "
            "copy for all"
        )
    return ""


def _wrapped(weight: nn.Parameter, cast: Cast) -> nn.Parameter:
    wrapped = nn.Parameter(_Weight(weight.detach(), cast), weight.requires_grad)
    # Dunders belong to the instance, like the tags' __deepcopy__.
    vars(wrapped).update(
        {k: v for k, v in vars(weight).items() if not k.startswith("__")}
    )
    return wrapped


def _as_plain(
    module: nn.Module, state: dict[str, Tensor], prefix: str, metadata: object
) -> None:
    """A state_dict hook that replaces the weight by a plain tensor, or a DTensor of one."""
    weight = state.get(f"{prefix}weight")
    if isinstance(weight, nn.Parameter):  # with keep_vars
        return
    shard = part_of(weight)
    if isinstance(shard, _Weight):
        plain = shard.plain
        if isinstance(weight, DTensor):
            plain = as_shard(weight, plain)
        state[f"{prefix}weight"] = plain


# Operations of FSDP2 and torch on a weight that return a weight: views and copies.
_VIEWS = {
    aten.detach.default,
    aten.alias.default,
    aten.view.default,
    aten.as_strided.default,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.copy_.default,
}
_COPIES = {
    aten.clone.default,
    aten.empty_like.default,
    aten.new_zeros.default,
    aten._to_copy.default,
    aten._pin_memory.default,
}


class _Scale(NamedTuple):
    """A scale, and the version of the weight that it was computed for."""

    scale: Tensor
    version: int


class _Weight(Tensor):
    """A weight, or a shard of one, like ``plain``, that is rounded when it is sent. cached: its
    last scale, shared by all views."""

    plain: Tensor
    cast: Cast
    cached: list[_Scale]

    @staticmethod
    def __new__(
        cls: Any, plain: Tensor, cast: Cast, cached: list[_Scale] | None = None
    ) -> _Weight:
        options = {name: getattr(plain, name) for name in ("dtype", "layout", "device")}
        options |= {"strides": plain.stride(), "storage_offset": plain.storage_offset()}
        self: _Weight = torch.Tensor._make_wrapper_subclass(
            cls, plain.size(), **options
        )
        self.plain, self.cast = plain, cast
        self.cached = [] if cached is None else cached
        return self

    def __init__(self, *args: object) -> None:
        pass

    @classmethod
    def __torch_dispatch__(  # type: ignore[override, unused-ignore]
        cls, function: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        first = args[0] if args else None
        leaves = tree_leaves((args, kwargs)) if function._schema.is_mutable else []
        args, kwargs = tree_map_only(_Weight, lambda w: w.plain, (args, kwargs or {}))
        out = function(*args, **kwargs)
        for leaf in leaves:
            if isinstance(leaf, _Weight):
                leaf.cached.clear()
        if function not in _VIEWS | _COPIES or not isinstance(first, _Weight):
            return out
        cached = first.cached if function in _VIEWS else None
        return tree_map_only(Tensor, lambda t: _Weight(t, first.cast, cached), out)

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[object, ...]:
        return self.plain.__reduce_ex__(protocol)

    def __repr__(self, **options: object) -> str:  # type: ignore[override]
        return f"_Weight({self.plain!r}, {self.cast})"

    def largest(self) -> Tensor:
        """The largest finite magnitude of this shard: float32, 0-dim."""
        if not self.plain.numel():
            return self.plain.new_zeros((), dtype=torch.float32)
        return largest_finite(self.plain, None).float()

    def remember(self, amax: Tensor) -> Tensor:
        """The scale factor for the largest magnitude, cached until the weight is written."""
        assert self.cast.rule is not None
        scale = scale_of(amax, None, get_format(self.cast.format), self.cast.rule)
        scale = FORM_OF[self.cast.rule].with_margin(scale, self.cast.margin)
        self.cached[:] = [_Scale(scale, self.plain._version)]
        return scale

    def scale(self, mesh: DeviceMesh) -> Tensor:
        """The scale factor of the weight over all shards; an all-reduce if it is not cached."""
        if self.cached and self.cached[0].version == self.plain._version:
            return self.cached[0].scale
        amax = self.largest()
        dist.all_reduce(amax, dist.ReduceOp.MAX, mesh.get_group())
        return self.remember(amax)

    def static_scale(self, layer: Any, elements: int, mesh: DeviceMesh) -> Tensor:
        """Returns the static scale of the weight of a converted layer. If it is not set, it is
        measured over all shards."""
        state: Tensor = layer.fp8_scale_weight
        history.note_scale(layer, "fp8_scale_weight")
        if layer.fp8_measured.fp8_scale_weight is False:
            total = second_moment(self.plain)
            dist.all_reduce(total, dist.ReduceOp.SUM, mesh.get_group())
            rms = static_rms(get_format(self.cast.format))
            state.copy_(nearest_power(total / (elements * rms**2)))
        return torch.where(state > 0, state, 1.0)

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: object,
        module: nn.Module,
        mp_policy: object,
    ) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """The bytes that this process sends, and the scale factor; see torch's FSDP2."""
        x, scale = self.plain, None
        if self.cast.rule:
            scale = self.scale(mesh)
        elif self.cast.scaling == "static":
            scale = self.static_scale(module, outer_size.numel(), mesh)
        if scale is not None:
            x = x.to(torch.promote_types(x.dtype, torch.float32)) / scale
        format = get_format(self.cast.format)
        sent = quantize_operand(
            x, format, rounding=self.cast.rounding, overflow=self.cast.overflow
        )
        bits = in_dtype(sent, format.dtype).view(torch.uint8)
        missing = -(-outer_size[0] // mesh.size()) - len(bits)  # rows of the last shard
        if missing > 0:
            bits = F.pad(bits, [0, 0] * (bits.dim() - 1) + [0, missing])
        return (bits,), scale

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: Tensor | None,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """The whole weight from the bytes of all processes; later written to ``out``."""
        (bits,) = all_gather_outputs
        format = get_format(self.cast.format)
        assert format.dtype is not None
        weight = restored(bits.view(format.dtype), metadata, param_dtype)
        if out is None:
            return weight, (weight,)
        # Through .data, so that autograd does not see a change: backward reads the same values.
        out.data.copy_(weight.flatten()[: out.numel()].view(out.shape))
        return None
