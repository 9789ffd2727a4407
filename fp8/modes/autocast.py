"""`fp8.autocast`: every matrix product inside the block runs under a recipe.

A torch-function mode over the calls in PRODUCTS, in whatever form they are written: positional,
keyword, method or operator.
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from ..casts.counts import OPEN, look_here
from ..common.compiler import FIRST_LOOK, called
from ..common.threads import Setting
from ..common.validation import check_name
from ..context.activation_checkpointing import checkpointed, in_reentrant
from ..context.active import (
    ACTIVE,
    Block,
    active_recipe,
    checked_backend,
    entered,
    index_of,
    product_recipe,
)
from ..products.activations import ACTIVATIONS
from ..recipes.history import AmaxHistory
from ..recipes.recipe import AUTO, PLAIN, UNIT, Recipe, given_recipe
from .dispatch import EXPANDED, OPAQUE, PRODUCTS

__all__ = [
    "EXPANDED",
    "OPAQUE",
    "PRODUCTS",
    "autocast",
    "checkpoint_contexts",
    "outside_compiler",
]


P = ParamSpec("P")
T = TypeVar("T")


def _force_eager() -> AbstractContextManager[Any] | None:
    if "torch._dynamo" not in sys.modules:
        return None
    try:
        stance: Any = torch.compiler.set_stance("force_eager")
    except RuntimeError as error:
        raise RuntimeError(
            "fp8.autocast was entered by a function that torch.compile could not compile in one "
            "piece (a graph break): compile it with fullgraph=True to see where"
        ) from error
    return cast("AbstractContextManager[Any]", stance)


STANCE = Setting(_force_eager)
"""torch.compile held at its stance "force_eager", which belongs to the process: what other threads
call meanwhile runs in eager mode too."""


def _forced_eager(call: Callable[[], Any]) -> Any:
    with STANCE:
        return call()


def outside_compiler(call: Callable[[], Any]) -> Any:
    """``call()`` with nothing in it compiled, from the frame up or by itself.

    The code that a compiler makes of a call under a mode has the mode in it already, and meets it
    again when it runs. So while a mode is active in eager code, all is eager.
    """
    if "torch._dynamo" not in sys.modules:  # nothing is compiled yet, and importing it is slow
        return call()
    return torch.compiler.disable(_forced_eager)(call)


class _Mode(TorchFunctionMode):
    """What an open `autocast` block does with each call. An object of its own for each opening: of
    one that was made elsewhere torch's compiler calls no ``__enter__``."""

    def __init__(self, block: autocast) -> None:
        super().__init__()
        self.block = block

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        recipe = active_recipe()
        if recipe is None:
            if function in PRODUCTS:
                product_recipe()  # the block may be that of another task
            return called(function, args, kwargs)
        handler = PRODUCTS.get(function)
        if handler is not None:
            result = handler(product_recipe(), *args, **kwargs)
            if isinstance(result, str):
                _leave(function, result)
            elif result is not NotImplemented:
                return result
        elif function is checkpoint:
            _check_recomputes(recipe)
            return checkpointed(self, *args, **kwargs)
        elif function in EXPANDED:
            with self.block:
                return EXPANDED[function](*args, **kwargs)
        elif function in OPAQUE:
            _leave(function, OPAQUE[function])
        elif function in ACTIVATIONS and recipe.saved_activations is not None:
            result = ACTIVATIONS[function](recipe.saved_activations, *args, **kwargs)
            if result is not NotImplemented:
                return result
        return called(function, args, kwargs)


class autocast:
    """Within the block, every matrix product runs under ``recipe``.

    recipe: a name in `fp8.RECIPES` or a `Recipe`; or "auto", which is "unit" for the products of
    the functions of `unit_scaling`, and so of unit-scaled models, and "tensor" for all others. Of
    nested blocks the innermost counts.
    enabled: False computes as torch does, whatever the recipe and the blocks around.
    opaque: what to do at a call whose products cannot be reached (OPAQUE; under a scaling by rows
    or blocks bilinear too, and an einsum of three operands): "raise" a NotImplementedError that
    names it, or "warn" and leave it in high precision.
    history: what a recipe with scaling "delayed" or "static" remembers, an `fp8.AmaxHistory`; a
    ValueError asks for it. Others do not read it.

    backend: "simulate" computes from rounded operands in the dtype of the tensors. "native" uses
    torch's kernels for products of two matrices whose sizes they take (`fp8.native.product.fits`;
    the others are simulated), and keeps one byte or half a byte for each element of their operands;
    a ValueError says why a recipe has no kernels, a RuntimeWarning why this device has none for it,
    or none that passes its proof (`fp8.native.selftest`), and simulates. "auto" is "native" on CUDA
    devices.

    The gradients of the products are computed under the recipe wherever the backward pass is run.
    float16, bfloat16, float32 and float64 tensors are rounded in their own dtype; integer, complex
    and sparse products, and those that sum over a single term (outer products, which would round
    their result and save no work), are left as they are.
    The block belongs to the thread that opens it. It may be inside `torch.autocast` or around it,
    and, as that, decorate a function, whose calls it is then around.
    To compile, compile the function that contains the block: while a block is open in eager code,
    what was compiled before runs in eager mode, so that no product is cast twice.
    Activation checkpointing recomputes outside of the block, wherever backward is called. Give it
    ``context_fn=fp8.checkpoint_contexts``, which opens the block again; compiled code and layers
    of `fp8.convert` need nothing. Without, torch raises a CheckpointError, and the reentrant kind,
    which would compute gradients from operands that were not cast, is refused with a RuntimeError.

    >>> import torch, fp8
    >>> x, w = torch.tensor([[1.06, 2.0]]), torch.tensor([[1.0, 1.0]])
    >>> with fp8.autocast("unit"):
    ...     y = torch.nn.functional.linear(x, w)
    >>> y  # 1.06 is rounded to 1.0
    tensor([[3.]])
    """

    def __init__(
        self,
        recipe: str | Recipe = AUTO,
        *,
        opaque: str = "raise",
        history: AmaxHistory | None = None,
        backend: str = "simulate",
        enabled: bool = True,
    ) -> None:
        check_name("opaque", opaque, ("raise", "warn"))
        given = given_recipe(recipe)
        chosen = given or PLAIN
        if enabled and chosen.keeps_history and not isinstance(history, AmaxHistory):
            raise ValueError(
                f"recipe {chosen.name!r} keeps its scales between passes: give it a place for "
                f"them, history=fp8.AmaxHistory(), not {history!r}"
            )
        self.recipe = chosen if enabled else None
        #: That of the products of unit-scaled functions.
        self.unit_recipe = (given or UNIT) if enabled else None
        self.opaque = opaque
        self.backend = checked_backend(backend, chosen) if enabled else "simulate"
        self.history = history
        #: Whether what is recomputed in the backward pass opens the block again by itself.
        self.reenters = False
        #: How many products of this history come before it in the pass; None: as many as those of
        #: the blocks around it.
        self.before: int | None = None

    def __enter__(self) -> autocast:
        eager = not torch.compiler.is_dynamo_compiling()
        if eager:
            STANCE.hold()
        outer_look = OPEN.look if eager else None
        if eager and not self.reenters:
            OPEN.look = look_here(self.recipe)
        modes = (_Mode(self), *FIRST_LOOK.items)
        # A block within one of the same history goes on counting its products.
        outer = ACTIVE.blocks[-1] if ACTIVE.blocks else None
        counter = [self.before or 0]
        if self.before is None and outer is not None and outer.history is self.history:
            counter = outer.counter
        again = self.reenters or in_reentrant()  # opened inside of what is recomputed
        ACTIVE.blocks.append(
            Block(
                recipe=self.recipe,
                unit_recipe=self.unit_recipe,
                opaque=self.opaque,
                modes=modes,
                history=self.history,
                counter=counter,
                backend=self.backend,
                reenters=again,
                entered=entered(self) if eager else None,
                outer_look=outer_look,
            )
        )
        for mode in modes:
            TorchFunctionMode.__enter__(mode)
        return self

    def __exit__(self, *error: Any) -> None:
        index = -1 if torch.compiler.is_dynamo_compiling() else index_of(self)
        block = ACTIVE.blocks.pop(index)
        for mode in reversed(block.modes):
            TorchFunctionMode.__exit__(mode, *error)
        if torch.compiler.is_dynamo_compiling():
            return
        if block.entered is not None:
            if not self.reenters:
                OPEN.look = block.outer_look
            STANCE.release()
        if index < len(ACTIVE.blocks):
            raise RuntimeError(_NOT_NESTED)

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        """``function``, each call of it in the block. Raises TypeError for one that goes on after
        its call (a generator, a coroutine): open the block inside of it."""
        if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
            raise TypeError(f"{function.__name__} goes on after its call: open the block inside")

        @functools.wraps(function)
        def inside(*args: P.args, **kwargs: P.kwargs) -> T:
            with _again(self):
                return function(*args, **kwargs)

        return inside


_NOT_NESTED = (
    "fp8.autocast: another block was opened inside of this one and is still open; blocks are "
    "closed innermost first: close those of a generator or a coroutine before it yields or awaits"
)


def _check_recomputes(recipe: Recipe) -> None:
    if recipe.changes_scales:
        raise NotImplementedError(
            f"recipe {recipe.name!r} cannot be checkpointed: what is recomputed would have other "
            'scales, as scaling "delayed" has moved on'
        )


def checkpoint_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The ``context_fn`` of `torch.utils.checkpoint.checkpoint` inside of `fp8.autocast`.

    What is recomputed in the backward pass runs under the recipe that the forward pass ran under:

        checkpoint(block, x, use_reentrant=False, context_fn=fp8.checkpoint_contexts)

    and in models of the library transformers
    ``model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": ...})``. Outside of
    a block it does nothing. Raises NotImplementedError under a recipe with scaling "delayed", whose
    scales would be others by then. torch.compile takes no context_fn of this kind, and needs none.
    """
    if not ACTIVE.blocks:
        return nullcontext(), nullcontext()
    block = ACTIVE.blocks[-1]
    if block.recipe is not None:
        _check_recomputes(block.recipe)
    again = _again(block)
    again.before = block.counter[0]
    return nullcontext(), again


def _again(block: Any) -> autocast:
    """One like ``block``, a `Block` or an autocast."""
    if block.recipe is None:
        return autocast(enabled=False)
    auto = block.recipe is not block.unit_recipe
    recipe, opaque, history = AUTO if auto else block.recipe, block.opaque, block.history
    return autocast(recipe, opaque=opaque, history=history, backend=block.backend)


def _leave(function: Callable[..., Any], why: str) -> None:
    """Says that a call is not cast, as the innermost block wants it."""
    message = f"{function.__name__} cannot run under fp8.autocast: {why}"
    if ACTIVE.blocks[-1].opaque == "raise":
        raise NotImplementedError(message)
    warnings.warn(f"{message}; left in high precision", stacklevel=4)
