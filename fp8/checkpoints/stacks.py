"""Stacks of experts, parameters (experts, ., .) of one module, and their weights one by one."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..casts.scaled_tensor import Memory
from ..layers.policies import bare_name

Apart = Callable[[Tensor], dict[str, Tensor]]
"""A function of a stack -> the weights (outputs, inputs) that it consists of, by their names."""


def stacks_in(name: str, experts: nn.Module) -> dict[str, nn.Parameter]:
    """Name -> stack, of a module that holds experts. Their biases are no stacks."""
    own = experts.named_parameters(recurse=False)
    return {f"{name}.{bare_name(last)}": p for last, p in own if p.dim() == 3}


def as_outputs(experts: nn.Module, stack: Tensor) -> Tensor:
    """A stack as (experts, outputs, inputs), or one of these as the module has it."""
    # Set by ``use_experts_implementation`` of transformers.
    return stack.mT if vars(experts)["is_transposed"] else stack


def oriented(experts: nn.Module, memory: Memory) -> Memory:
    """A stack (experts, outputs, inputs) as the module has it."""
    if not vars(experts).get("is_transposed") or memory.tile is None:
        return memory
    assert memory.scale is not None
    values, scale = memory.values.mT.contiguous(), memory.scale.mT.contiguous()
    return replace(memory, values=values, scale=scale, tile=memory.tile[::-1])


def says_outputs(experts: nn.Module) -> bool:
    """Whether a module says which dimension of its stacks are the outputs."""
    return "is_transposed" in vars(experts)


def of_files(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What files of a model have for tensors of its state_dict, by what its library says: name ->
    tensor."""
    models = sys.modules.get("transformers.modeling_utils")
    library: Any = sys.modules.get("transformers.core_model_loading")
    if models is None or not isinstance(model, models.PreTrainedModel):
        return tensors
    try:
        return library.revert_weight_conversion(model, tensors)
    except ValueError:
        # A model whose experts transformers has read in low precision; it cannot save it either.
        return tensors


def names_in_files(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, str]:
    """Name in the state_dict -> name in files, of tensors that are the same in both."""
    names = {id(x): name for name, x in tensors.items()}
    found = of_files(model, tensors)
    return {names[id(x)]: name for name, x in found.items() if id(x) in names}


def weights_in_files(model: nn.Module, name: str, stack: Tensor) -> dict[str, Tensor]:
    """The weights (outputs, inputs) that files have in place of a stack, or of the weight of layers
    that a model has as one: name -> tensor; {} if they have no such ones."""
    found = of_files(model, {name: stack})
    is_apart = all(key.endswith(".weight") and x.dim() == 2 for key, x in found.items())
    return found if is_apart and len(found) > 1 else {}


def of_experts(name: str, experts: nn.Module, stack: Tensor) -> dict[str, Tensor]:
    """The weight of each expert, under a name that no file has."""
    each = as_outputs(experts, stack)
    return {f"{name}.{i}.weight": weight for i, weight in enumerate(each)}


def rows_in(model: nn.Module, name: str, stack: Tensor) -> dict[str, range]:
    """Which rows of a stack, counted over all experts, each weight is that files have instead: name
    -> rows. {} if files do not have it in parts."""
    *lead, columns = stack.shape
    rows = torch.arange(math.prod(lead)).view(*lead, 1)
    found = of_files(model, {name: rows})
    whole = of_files(model, {name: torch.empty(stack.shape, device="meta")})
    if len(found) == 1:
        return {}
    ranges = {}
    for key, part in found.items():
        numbers = part.flatten().tolist()
        start, count = numbers[0], len(numbers)
        ranges[key] = range(start, start + count)
        if numbers != [*ranges[key]] or whole[key].shape != (count, columns):
            return {}
    return ranges
