"""The layers of a model that `fp8.convert` can convert, and the reason why others stay."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from ..common.mixin import bare_class
from ..recipes.history import has_scales
from ..recipes.recipe import PLAIN, STATIC, UNIT, Recipe

#: Backends that are other libraries. Their layers replace the layers of the model.
ADAPTERS = ("transformer_engine", "torchao")

#: The layers that are converted, including subclasses, beside those that `holds_experts` finds.
LAYERS: tuple[type[nn.Module], ...] = (
    nn.Linear,
    nn.MultiheadAttention,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)

#: Layers with a weight that are never converted -> the reason.
EXCEPTIONS: dict[type[nn.Module], str] = {
    nn.Bilinear: "a product of three operands",
    **dict.fromkeys((nn.Embedding, nn.EmbeddingBag), "a lookup, not a product"),
    **dict.fromkeys(
        (nn.RNNBase, nn.RNNCellBase), "one kernel computes all its products"
    ),
}


def is_unit_scaled(module: nn.Module) -> bool:
    """Whether the module declares it: `unit_scaling.parameter.TaggedModule`."""
    return bool(getattr(module, "fp8_unit_scaled", False))


def auto_of(module: nn.Module) -> Recipe:
    """The recipe that "auto" stands for in a layer."""
    if is_unit_scaled(module):
        return UNIT
    if has_size(module) or has_scales(module):
        return STATIC
    return PLAIN


def has_size(module: nn.Module) -> bool:
    """Whether `unit_scale` has set the size of a weight of the layer, or will in the first call:
    operands have RMS 1, so static scales hold."""
    return any(
        getattr(p, "mup_divisor", None) for p in module.parameters(recurse=False)
    )


def check_values_set(what: str, model: nn.Module) -> None:
    """Raises ValueError for a model of ``unit_scale`` without a batch that has not run: ``what``
    reads values that its first call sets."""
    for name, parameter in model.named_parameters():
        if getattr(parameter, "mup_pending", False):
            raise ValueError(
                f"{what} reads {name}, which the first call of the model sets: call the model "
                "before, or pass batch= to unit_scale"
            )


def candidates(model: nn.Module) -> dict[str, nn.Module]:
    """Name -> layer, of all layers that can be converted."""
    return {name: module for name, module, why in layers_of(model) if why is None}


def layers_of(model: nn.Module) -> Iterator[tuple[str, nn.Module, str | None]]:
    """(name, module, why it stays or None) of modules with a weight, and of converted ones."""
    inside = inside_attention(model)
    for name, module in model.named_modules():
        # A part of the layer whose weight it computes.
        if isinstance(module, parametrize.ParametrizationList):
            continue
        weights = parametrize.is_parametrized(module) or any(
            is_lazy(p) or p.dim() > 1 for p in module.parameters(recurse=False)
        )
        if weights or "fp8_settings" in vars(module):
            yield name, module, _why_not(module, inside.get(id(module)))


def inside_attention(model: nn.Module) -> dict[int, str]:
    """id -> owner's name, for each module that an nn.MultiheadAttention holds but never calls."""
    owners: dict[int, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            owner = name or type(module).__name__
            owners |= dict.fromkeys(map(id, module.children()), owner)
    return owners


def is_transposed(module: nn.Module) -> bool:
    """Whether it is the linear layer of GPT-2, transformers' ``Conv1D``: weight (in, out)."""
    library = sys.modules.get("transformers.pytorch_utils")
    return library is not None and isinstance(module, library.Conv1D)


def holds_experts(module: nn.Module) -> bool:
    """Whether all parameters of a module are its own stacks of matrices (experts, ., .) and biases
    (experts, .). Not a class of torch: those are layers of one weight. Not one vector for each head
    (heads, 1, width), as of positions and gains."""
    own = list(module.parameters(recurse=False))
    parameters = list(module.parameters())
    of_torch = bare_class(module).__module__.startswith("torch.")
    if of_torch or any(map(is_lazy, parameters)):
        return False
    stacks = [p.shape for p in own if p.dim() == 3]
    experts = next((shape[0] for shape in stacks if 1 not in shape[1:]), 0)
    alike = all(p.dim() in (2, 3) and p.shape[0] == experts for p in parameters)
    return experts > 1 and len(own) == len(parameters) and alike


def has_one_product(module: nn.Module) -> bool:
    """Whether a layer computes one product, of an input and its weight."""
    several = isinstance(module, nn.MultiheadAttention)
    return not several and (isinstance(module, LAYERS) or is_transposed(module))


def _why_not(module: nn.Module, owner: str | None) -> str | None:
    if owner is not None:
        return f"computed by {owner}"
    if why := why_quantized(module):
        return why
    library = bare_class(module).__module__.partition(".")[0]
    if library in ADAPTERS:
        return f"a layer of {library}, which computes its products"
    for parameter in module.parameters(recurse=False):
        if not parameter.dtype.is_floating_point or parameter.layout != torch.strided:
            return f"no recipe casts its weight: {parameter.dtype}, {parameter.layout}"
    is_layer = isinstance(module, LAYERS) or is_transposed(module)
    if is_layer or holds_experts(module):
        if "forward" not in vars(module):
            return None
        return "its forward was replaced on the instance: convert the model before that"
    whys = (why for kind, why in EXCEPTIONS.items() if isinstance(module, kind))
    return next(whys, "its products are its own: run the model under fp8.autocast")


def why_quantized(module: nn.Module) -> str:
    """Why the weights of a layer are codes, which cannot be scaled or cast; "" if they are not."""
    for parameter in module.parameters(recurse=False):
        kind = type(parameter)
        library = kind.__module__.partition(".")[0]
        # Whatever dtype their classes report.
        if library in ("bitsandbytes", "torchao"):
            return f"quantized: its weight is a {kind.__name__} of {library}"
        is_matrix = not is_lazy(parameter) and parameter.dim() > 1
        if is_matrix and parameter.element_size() == 1:
            return f"quantized: its weight is {parameter.dtype}"
    return ""


Where = Callable[[str, nn.Module], bool]
"""(name, module) -> whether it is chosen."""


def checked_where(where: Any) -> Where | None:
    """``where``. Raises TypeError unless it is a function or None, and where it returns no bool."""
    if where is None:
        return None
    if not callable(where):
        raise TypeError(
            f"where is a {type(where).__name__}; give (name, module) -> bool"
        )

    def checked(name: str, module: nn.Module) -> bool:
        answer = where(name, module)
        if not isinstance(answer, bool):
            raise TypeError(
                f"where must return a bool, got {answer!r} for layer {name!r}"
            )
        return answer

    return checked
