"""The layers of a model that are stored in low precision, with their layouts, and why others are
not."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..casts.scaled_tensor import dequantized
from ..common.dtensor import whole
from ..common.mixin import bare_class
from ..common.report import LEFT_ALONE, Row
from ..layers.adapters import is_replacement
from ..layers.policies import bare_name
from ..layers.select import check_values_set, holds_experts, is_transposed
from ..recipes.history import history_of, is_history
from .fusing import is_of_expert
from .layouts import LAYOUTS, Layout
from .stacks import (
    Apart,
    names_in_files,
    of_experts,
    of_files,
    says_outputs,
    stacks_in,
    weights_in_files,
)
from .writing import layout_of, misfit, needs_input_scale, unfit


def state_of(model: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    """Name -> (the tensor in the state_dict, the parameter or buffer), without histories."""
    # Wrappers of modules may or may not take their part of a name out of the state_dict.
    state = {bare_name(name): tensor for name, tensor in model.state_dict().items()}
    parameters = model.named_parameters(remove_duplicate=False)
    buffers = model.named_buffers(remove_duplicate=False)
    found = {}
    for given, source in (*parameters, *buffers):
        name = bare_name(given)
        if name in state and not is_history(name):
            found[name] = (state[name], source)
    return found


def _check_plain(model: nn.Module) -> None:
    """Raises ValueError for a model that computes more than its weights say."""
    for name, module in model.named_modules():
        if type(module).__module__.startswith("unit_scaling.layers"):
            raise ValueError(
                f"{name} is a module of unit_scaling: its factors are in no weight. Make the model "
                "of torch's modules, and unit-scale it by unit_scaling.transforms.unit_scale"
            )
        for scope, _ in getattr(module, "_scopes", ()):
            kind = type(scope).__name__
            raise ValueError(f"{kind} is no part of the weights: export without it")
    check_values_set("export", model)


@dataclass(frozen=True)
class Chosen:
    """What of a model is stored in low precision. A layer is a linear one, or one expert's part of
    a stack.

    Attributes:
        rows: of the report.
        layers: name of a layer -> the module that has its weight.
        layouts: name of a layer -> its layout.
        apart: name of a stack -> the function that takes it apart.
        parts: name of a stack -> the names of its layers.
        ignored: the names of layers that engines would else expect in low precision.
        names: name in the state_dict -> name in files, of tensors that are the same in both.
    """

    rows: list[Row] = field(default_factory=list)
    layers: dict[str, Any] = field(default_factory=dict)
    layouts: dict[str, Layout] = field(default_factory=dict)
    apart: dict[str, Apart] = field(default_factory=dict)
    parts: dict[str, list[str]] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)

    def weights_of(self, name: str) -> list[str]:
        """The names of what comes in the place of an entry of the state_dict."""
        parts = self.parts.get(name)
        if parts is None:
            return [name]
        return [f"{part}.weight" for part in parts]


class Values:
    """The tensors of a model, and the weights that its stacks consist of.

    Attributes:
        state: of the model, as `state_of` returns it.
    """

    def __init__(
        self,
        state: dict[str, tuple[Tensor, Tensor]],
        found: Chosen,
        is_meta: bool = False,
    ) -> None:
        self.state = state
        self._apart, self._is_meta = found.apart, is_meta
        self._stack_of = {
            weight: stack for stack in found.parts for weight in found.weights_of(stack)
        }
        self._open = ""
        self._weights: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        """A tensor, gathered from all processes. The weights of the last stack stay in memory."""
        stack = self._stack_of.get(name)
        if stack is None:
            return self._read(name)
        if stack != self._open:
            self._weights.clear()
            self._weights = self._apart[stack](dequantized(self._read(stack)))
            self._open = stack
        return self._weights[name]

    def _read(self, name: str) -> Tensor:
        tensor = self.state[name][0]
        if self._is_meta:
            return _meta(tensor)
        return whole(tensor)


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def chosen(
    model: nn.Module,
    state: dict[str, tuple[Tensor, Tensor]],
    name_of_layout: str | None,
) -> Chosen:
    """The layers to store in low precision. state: of the model, as `state_of` returns it.
    name_of_layout: None for the first one of files that has the recipe of a layer."""
    modules = {bare_name(name): m for name, m in model.named_modules()}
    _check_plain(model)
    uses = Counter(id(p) for m in modules.values() for p in m.parameters(recurse=False))
    found = Chosen()
    metas = {name: _meta(tensor) for name, (tensor, _) in state.items()}
    found.names.update(names_in_files(model, metas))
    for name, module in modules.items():
        if is_replacement(module):
            raise ValueError(
                f"{name} is a layer of another library: fp8.revert the model first"
            )
        recipe = getattr(module, "fp8_recipe", None)
        why = "no recipe"
        if recipe is not None:
            why = _why_not(name, module, uses)
            layout = layout_of(recipe, name_of_layout)
            if isinstance(layout, str):
                why = why or layout
            elif not why:
                why = _add(found, model, name, module, layout)
            done = LEFT_ALONE if why else "FP8"
            what = bare_class(module).__name__
            found.rows.append(Row(name, what, done, why or recipe.name))
        if why:
            found.ignored.extend(_expected(found, model, name, module))
    return found


def _add(
    found: Chosen,
    model: nn.Module,
    name: str,
    module: Any,
    layout: Layout,
) -> str:
    """Adds a module to ``found``; or returns why it stays in high precision."""
    apart, parts, shapes = {}, {}, {}
    weight = f"{name}.weight"
    if holds_experts(module):
        joined = stacks_in(name, module)
    elif layout.stacked:
        return f"layout {layout.name!r} has stacks of experts alone"
    elif weight in found.names:
        joined = {}
        shapes[name] = module.weight.shape
    else:
        joined = {weight: module.weight}
    for stack, parameter in joined.items():
        apart[stack] = partial(weights_in_files, model, stack)
        if layout.stacked:
            apart[stack] = partial(of_experts, stack, module)
        weights = apart[stack](_meta(parameter))
        if not weights:
            return _no_such_files(module, layout)
        each = {key.removesuffix(".weight"): x.shape for key, x in weights.items()}
        parts[stack] = list(each)
        shapes |= each
    has_experts = layout.experts or not layout.fused
    for part, shape in shapes.items():
        why = misfit(layout, shape, is_whole=not parts)
        if why:
            return why
        if not has_experts and is_of_expert(part):
            raise ValueError(f"layout {layout.name!r} has no experts, as {part} is")
    why = _no_history(module, layout)
    if why:
        return why
    other = next(iter(found.layouts.values()), layout)
    if (layout.method, layout.style) != (other.method, other.style):
        used = other.style or other.method
        return f"the file has layout {used!r} and no other: convert all layers to one recipe"
    found.layers.update(dict.fromkeys(shapes, module))
    found.layouts.update(dict.fromkeys(shapes, layout))
    found.apart.update(apart)
    found.parts.update(parts)
    return ""


def _no_such_files(module: Any, layout: Layout) -> str:
    if isinstance(module, nn.Linear):
        return "the files of this model have its weight as a part of another one"
    rows = [row for row in LAYOUTS.values() if row.stacked]
    fit = [row.name for row in rows if not unfit(module.fp8_recipe, row)]
    then = f": take layout {fit[0]!r}" if fit else ""
    return (
        f"layout {layout.name!r} has a weight for each expert, the files of this model have stacks"
        f"{then}"
    )


def _expected(
    found: Chosen,
    model: nn.Module,
    name: str,
    module: nn.Module,
) -> list[str]:
    """The layers of a module in high precision which engines expect in low precision, unless a
    configuration names them."""
    if holds_experts(module):
        stacks = stacks_in(name, module)
        in_files = of_files(model, {name: _meta(p) for name, p in stacks.items()})
        return [key.removesuffix(".weight") for key in in_files]
    weight = getattr(module, "weight", None)
    # Routers, too, which need not be linear layers here.
    is_layer = isinstance(weight, Tensor) and weight.dim() == 2
    if not is_layer or isinstance(module, nn.Embedding):
        return []
    in_file = found.names.get(f"{name}.weight", name)
    both = [name, in_file.removesuffix(".weight")]
    return list(dict.fromkeys(both))


def _why_not(
    name: str,
    module: Any,
    uses: Counter[int],
) -> str:
    """Why a layer cannot be stored under any recipe; "" if it can. uses: of each parameter."""
    is_stack = holds_experts(module)
    if is_stack and not says_outputs(module):
        return "it does not say whether its stacks are transposed: it stays in high precision"
    if is_stack and module.fp8_recipe.keeps_history:
        return (
            "its scales are of products, not of experts: take recipe 'tensor' or 'row'"
        )
    if not is_stack and not isinstance(module, nn.Linear):
        kind = "transposed weights" if is_transposed(module) else "layers of this kind"
        return f"no layout has {kind}: it stays in high precision"
    if not name:
        return "the model itself: it has no name to be stored under; put it into nn.Sequential"
    own = dict(module.named_parameters(recurse=False))
    if not is_stack and "weight" not in own:
        return (
            "its weight is computed, not a parameter: remove its parametrization first"
        )
    if any(uses[id(p)] != 1 for last, p in own.items() if last != "bias"):
        return "its weight is tied to another module's"
    return ""


def _no_history(layer: Any, layout: Layout) -> str:
    """Why the scale of a layer's input is not known; "" if it is, or if the weight is zero."""
    cast = layer.fp8_recipe.input
    if not needs_input_scale(layer.fp8_recipe, layout) or not cast.keeps_history:
        return ""
    seen = history_of(layer, "input")
    assert seen is not None
    if seen.any() or not whole(layer.weight.detach()).float().any():
        return ""
    how = "train the model" if cast.history else "calibrate or train the model"
    return (
        f"scaling {cast.scaling!r} has seen no input that is not all zeros: {how} first"
    )
