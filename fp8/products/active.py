"""What the open `fp8.autocast` blocks specify for a product: recipe, backend, state of scales."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..casts.operands import NO_STATES, States
from ..common.validation import check_name
from ..frame import FRAMES, IN_PIECES
from ..recipes.history import ROLES, LayerState
from ..recipes.recipe import Recipe
from ..torch_internals.pipelining import in_shape_inference
from ..torch_internals.running_calls import checkpoints, in_reentrant
from ..warnings import RecipeWarning, warn_once

#: How a product is computed. "simulate": from rounded operands in their dtype. "native": by torch's
#: FP8 kernels where they support it. "auto": by those on CUDA devices that have them; products on
#: CPUs are simulated unless "native" requests kernels.
BACKENDS = ("simulate", "native", "auto")


def checked_backend(backend: str, recipe: Recipe, others: Iterable[str] = ()) -> str:
    """``backend``; "simulate" for "auto" if the recipe has no kernels. Raises ValueError for
    "native" then, and for an unknown backend (the message also lists ``others``)."""
    check_name("backend", backend, (*BACKENDS, *others))
    if backend == "simulate":
        return backend
    # late: most runs on CPUs have no kernels
    from ..kernels.product import why_not_recipe

    why_not = why_not_recipe(recipe)
    if why_not and backend == "native":
        raise ValueError(f"recipe {recipe.name!r} has no kernels: {why_not}")
    if why_not:
        return "simulate"
    return backend


class Block(NamedTuple):
    """The settings of an open `fp8.autocast` block: the field ``block`` of its frame.

    recipe: None if not enabled. unit_recipe: the recipe of products of unit-scaled functions;
    differs under "auto". modes: its own and those it put on top. state: the state of the converted
    layer whose block it is.
    reenters: whether a recomputation in the backward pass opens it again by itself. is_traced:
    whether torch.compile traced its opening. off: whether converted layers run in high precision
    too. checkpoints: those running when such a block was opened. task: the asyncio task that opened
    it, if any.
    """

    recipe: Recipe | None
    unit_recipe: Recipe | None
    modes: tuple[TorchFunctionMode, ...]
    state: LayerState | None
    backend: str
    reenters: bool
    is_traced: bool
    off: bool
    checkpoints: int
    task: asyncio.Task[Any] | None


def running_task() -> asyncio.Task[Any] | None:
    """The asyncio task that runs in this thread, if any."""
    try:
        return asyncio.current_task()
    except RuntimeError:  # no event loop runs in this thread
        return None


def product_recipe(unit: bool = False) -> Recipe | None:
    """The recipe of a product by the innermost block of this thread, if enabled. unit: whether its
    tensors are unit-scaled. Raises RuntimeError where it could be computed without casts."""
    block: Block | None = FRAMES.items[-1].block
    if block is None:
        return None
    if not torch.compiler.is_dynamo_compiling():
        _check_entered(block)
    if block.recipe is None:
        return None
    if not block.reenters and not torch.is_grad_enabled() and in_reentrant():
        raise RuntimeError(
            "checkpoint(use_reentrant=True) inside fp8.autocast would recompute products outside "
            "of the block, without casts: use checkpoint(use_reentrant=False, "
            "context_fn=fp8.checkpoint_contexts) or fp8.convert"
        )
    if unit:
        return block.unit_recipe
    return block.recipe


def is_off() -> bool:
    """Whether the innermost block, of which there is one, turns converted layers off. Raises
    RuntimeError inside of a checkpoint whose other pass would run outside of the block."""
    frame = FRAMES.items[-1]
    block: Block = frame.block
    if not block.off or frame.measurement is not None:
        return False
    if not torch.compiler.is_dynamo_compiling():
        _check_entered(block)
        trains = torch.is_grad_enabled() or in_reentrant()
        if trains and checkpoints() > block.checkpoints:
            raise RuntimeError(
                "a checkpoint recomputes converted layers outside of fp8.autocast(enabled=False), "
                "or inside of a block that its forward pass did not run in: use "
                "checkpoint(use_reentrant=False, context_fn=fp8.checkpoint_contexts), or open the "
                "block in the checkpointed function"
            )
    return True


def _check_entered(block: Block) -> None:
    if block.is_traced and block.recipe is not None:
        raise RuntimeError(IN_PIECES)
    task = block.task
    if task is not None and not task.done() and running_task() is not task:
        where = f"{task.get_name()}, another task of this thread"
        raise RuntimeError(f"fp8.autocast is open in {where}: close it before await")


def histories(
    recipe: Recipe,
    product: str,
    *operands: Tensor,
    layer: bool = False,
    groups: int = 0,
    state: LayerState | None = None,
) -> States:
    """The states of a product. layer: whether the second operand is a weight. groups: the number of
    groups, which have states of their own. state: the state of the layer; None: of the enclosing
    layer."""
    frame = FRAMES.items[-1]
    measurement = frame.measurement
    if in_shape_inference() or (measurement and not measurement.of_states):
        return NO_STATES
    if state is None and frame.block is not None:
        state = frame.block.state
    if state is None and recipe.keeps_history:
        raise ValueError(NO_STATE.format(recipe.name))
    if state is None or not (recipe.keeps_history or state.looks):
        return NO_STATES
    name = state.name_of(product, *operands)
    look = None if measurement else state.look(name, operands[0])
    second = recipe.weight if layer else recipe.input
    third = recipe.input if len(operands) > 2 else None
    casts = (recipe.input, second, third, recipe.grad)
    found: list[Tensor | None] = []
    for role, cast in zip((*ROLES, "grad"), casts, strict=True):
        buffer = None
        # A measurement sets static scales alone.
        if cast and cast.keeps_history and not (measurement and cast.history):
            length, device = cast.history or 0, operands[0].device
            buffer = state.buffer(name + role, length, device, groups)
        found.append(buffer)
    a, b, value, grad = found
    return States(a, b, value, grad, look)


NO_STATE = (
    "recipe {0!r} keeps scales between passes, and a scale belongs to a layer: "
    "fp8.convert(model, {0!r}) gives each layer its own"
)


def warn_unsummed(recipe: Recipe, product: str) -> None:
    """Warns, once, of a kind of product with torch's sums."""
    if recipe.accumulate is not None:
        message = (
            f"{product} has no sums of accumulate={recipe.accumulate!r}: its operands are cast, "
            "and its sums are torch's. Linear layers and matrix products have them"
        )
        warn_once(RecipeWarning, message, key=product)
