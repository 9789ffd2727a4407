"""`fp8.autocast`: every matrix product inside the block runs under a recipe.

It is a torch-function mode that intercepts the functions in PRODUCTS, whether they are called with
positional or keyword arguments, as a method or as an operator.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from ..casts.counts import LATEST
from ..frame import FRAMES, Frame, close_frame, open_frame
from ..products.active import (
    NO_STATE,
    Block,
    checked_backend,
    product_recipe,
    running_task,
)
from ..recipes.history import LayerState
from ..recipes.policy import Policy, source_of
from ..recipes.recipe import AUTO, PLAIN, UNIT, Recipe, recipe_unless_auto
from ..torch_internals import Arguments, Keywords, TorchFunction
from ..torch_internals.decorators import taken_as_constant
from ..torch_internals.hidden_functions import HIDDEN, called, reveal
from ..torch_internals.running_calls import (
    checkpoints,
    in_recomputation,
    in_reentrant,
    is_from_graph,
)
from ..warnings import RecipeWarning, show
from .control_flow import CALLERS, run_within, runs_functions, within
from .dispatch import (
    EXPANDED,
    LEFT,
    OPERATORS,
    PLACES,
    PRODUCTS,
    SPECIAL,
    SPELLINGS,
    expansion,
    handler_of,
    outside_of_modes,
)

P = ParamSpec("P")
T = TypeVar("T")

HIDDEN.extend(SPELLINGS["grouped_mm"])


class _Mode(TorchFunctionMode):
    """The torch-function mode of an open `autocast` block. Each entry creates a new one, because
    torch.compile does not call ``__enter__`` of a mode created outside of the graph."""

    def __torch_function__(
        self,
        function: TorchFunction,
        types: object,
        args: Arguments = (),
        kwargs: Keywords | None = None,
    ) -> object:
        kwargs = kwargs or {}
        block = FRAMES.items[-1].block
        recipe = None if block is None else block.recipe
        if recipe is not None and (
            function in SPECIAL
            or function in CALLERS
            or isinstance(function, OPERATORS)
        ):
            return self._special(recipe, function, args, kwargs)
        if recipe is None and function in PRODUCTS:
            product_recipe()  # raises if the block belongs to another task
            if torch.compiler.is_dynamo_compiling() and any(
                map(_is_around, FRAMES.items)
            ):
                return outside_of_modes(PLACES[function], args, kwargs)
        return called(function, args, kwargs)

    def _special(
        self,
        recipe: Recipe,
        function: TorchFunction,
        args: Arguments,
        kwargs: Keywords,
    ) -> object:
        if (
            function in EXPANDED
            and (expanded := expansion(function, args, kwargs)) is not None
        ):
            return within((self, *FRAMES.items[-1].early_modes), expanded)()
        handler = handler_of(function)
        if handler is not None:
            if kwargs.get("out") is not None:
                if is_from_graph():
                    return function(*args, **kwargs)
                raise ValueError(
                    "a product under fp8.autocast cannot write to out=: assign it"
                )
            kwargs.pop("out", None)
            result = handler(product_recipe(), *args, **kwargs)
            if isinstance(result, str):
                _warn_left(function.__name__, result)
            elif result is not NotImplemented:
                if not torch.is_grad_enabled():
                    warn_of_function(args)
                return result
        elif runs_functions(function):
            if function is checkpoint:
                _check_recomputes(recipe)
            return run_within(self, function, args, kwargs)
        elif function in LEFT:
            _warn_left(function.__name__, LEFT[function])
        elif isinstance(function, OPERATORS):
            warn_of_operator(function, args, kwargs)
        return called(function, args, kwargs)


def _is_around(frame: Frame) -> bool:
    """Whether eager code opened the block of a frame: its mode sees each call of a graph that runs
    in it."""
    block = frame.block
    return block is not None and not block.is_traced and block.recipe is not None


class autocast:
    """Runs every matrix product inside the block under ``recipe``.

    So are their gradients, wherever the backward pass runs. float16, bfloat16, float32 and float64
    tensors are rounded in their own dtype. Products of integer, complex or sparse tensors are left
    unchanged, and so are products that sum over a single term (outer products, where a cast would
    round the result and save no work). A call whose products cannot be intercepted (LEFT, and an
    einsum with a repeated index) stays in high precision, with a RecipeWarning.

    The block belongs to the thread that opens it; the innermost of nested blocks applies. It can be
    inside or outside of `torch.autocast`, decorate a function, and be compiled. A function that was
    compiled before is compiled anew for it. Activation checkpoints need `checkpoint_contexts`.

    Args:
        recipe: a name in `fp8.RECIPES`, a `Recipe`, or "auto": "unit" for the products of the
            functions of `unit_scaling`, and so of its modules, and "tensor" for all others.
            Or a `fp8.Policy` without a switch (`fp8.Policy.at`) that selects no layers.
        backend: "simulate" computes from rounded operands in the dtype of the tensors. "native"
            uses torch's kernels for products of two matrices of supported sizes
            (`fp8.kernels.product.fits`), saves their operands in one byte or less per element, and
            simulates the others. It simulates all, with a RuntimeWarning, if this device has no
            kernels for the recipe that pass the self-test (`fp8.kernels.selftest`). "auto" is
            "native" on CUDA devices.
        enabled: False computes as torch does, whatever the recipe and the surrounding blocks, in
            layers of `fp8.convert` too.

    Raises:
        ValueError: if a recipe keeps scales between passes ("delayed", "static") or a policy
            selects layers, which `fp8.convert` takes, or if ``backend`` is "native" and the recipe
            has no kernels.

    >>> import torch, fp8
    >>> x, w = torch.tensor([[1.06, 2.0]]), torch.tensor([[1.0, 1.0]])
    >>> with fp8.autocast("unit"):
    ...     y = torch.nn.functional.linear(x, w)
    >>> y  # 1.06 is rounded to 1.0
    tensor([[3.]])
    """

    #: The state of the converted layer whose block it is.
    state: LayerState | None = None

    def __init__(
        self,
        recipe: str | Recipe | Policy = AUTO,
        *,
        backend: str = "simulate",
        enabled: bool = True,
    ) -> None:
        #: Whether converted layers inside run in high precision too.
        self.off = not enabled
        if isinstance(recipe, Policy):
            if recipe.switch or recipe.selects:
                raise ValueError(_PARTS)
            enabled = enabled and recipe.recipe is not None
            recipe = source_of(recipe.recipe) or AUTO
        explicit = recipe_unless_auto(recipe)
        base = explicit or PLAIN
        if enabled and base.keeps_history and self.state is None:
            raise ValueError(NO_STATE.format(base.name))
        self.recipe: Recipe | None = None
        #: The recipe of products of unit-scaled functions.
        self.unit_recipe: Recipe | None = None
        self.backend = "simulate"
        if enabled:
            self.recipe = base
            self.unit_recipe = explicit or UNIT
            self.backend = checked_backend(backend, base)
        #: Whether a recomputation in the backward pass opens the block again by itself.
        self.reenters = False

    def __enter__(self) -> autocast:
        eager = not torch.compiler.is_dynamo_compiling()
        if self.recipe is not None and self.recipe.changes_scales:
            refuse_recomputation(self.recipe)
        # Else a graph hides some functions from the mode.
        reveal()
        if eager and not self.reenters:
            LATEST.check = None
        modes = (_Mode(), *FRAMES.items[-1].early_modes)
        again = self.reenters or in_reentrant()  # opened inside of a recomputed segment
        block = Block(
            recipe=self.recipe,
            unit_recipe=self.unit_recipe,
            modes=modes,
            state=self.state,
            backend=self.backend,
            reenters=again,
            is_traced=not eager,
            off=self.off,
            checkpoints=checkpoints() if self.off else 0,
            task=running_task() if eager else None,
        )
        open_frame(self, block=block)
        for mode in modes:
            TorchFunctionMode.__enter__(mode)
        return self

    def __exit__(self, *error: object) -> None:
        closed, inside = close_frame(self)
        for mode in reversed(closed.block.modes):
            TorchFunctionMode.__exit__(mode, *error)
        if any("block" in frame.changes for frame in inside):
            raise RuntimeError(
                "fp8.autocast: a block inside is open; blocks are closed innermost first: close "
                "those of a generator or a coroutine before it yields or awaits"
            )

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        """Wraps ``function`` so that each call runs in the block. Raises TypeError for a generator
        or coroutine function, whose body runs after the call returns."""
        if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(
            function
        ):
            raise TypeError(
                f"{function.__name__} goes on after its call: open the block inside"
            )

        @functools.wraps(function)
        def inside(*args: P.args, **kwargs: P.kwargs) -> T:
            with _again(self):
                return function(*args, **kwargs)

        return inside


class LayerBlock(autocast):
    """The block of a converted layer, which each of its calls opens anew, also when a checkpoint
    recomputes it. state: where its recipe keeps scales; None if it keeps none."""

    def __init__(self, recipe: Recipe, backend: str, state: LayerState | None) -> None:
        self.state = state
        super().__init__(recipe, backend=backend)
        self.reenters = True


def high_precision(off: bool | None = None) -> autocast:
    """A block without casts. off: whether converted layers are off; None: as outside of it."""
    block = autocast(enabled=False)
    if off is None:
        around: Block | None = FRAMES.items[-1].block
        off = around is not None and around.off
    block.off = off
    return block


_PARTS = (
    "fp8.autocast runs all products under one recipe: a policy that selects layers (rules, first, "
    "last, keep) is for fp8.convert(model, policy); of one with a switch, pass policy.at(fraction)"
)


def refuse_recomputation(recipe: Recipe) -> None:
    """Raises NotImplementedError if a checkpoint recomputes, for a recipe that changes scales."""
    if in_recomputation():
        _check_recomputes(recipe)


def _check_recomputes(recipe: Recipe) -> None:
    if recipe.changes_scales:
        raise NotImplementedError(
            f"recipe {recipe.name!r} cannot be checkpointed with use_reentrant=False: the "
            'recomputation would use other scales, because scaling "delayed" has updated them'
        )


def checkpoint_contexts() -> tuple[
    AbstractContextManager[object], AbstractContextManager[object]
]:
    """The ``context_fn`` for `torch.utils.checkpoint.checkpoint` inside of `fp8.autocast`.

    The recomputation in the backward pass runs under the recipe of the forward pass:

        checkpoint(block, x, use_reentrant=False, context_fn=fp8.checkpoint_contexts)

    Without it torch raises a CheckpointError; reentrant checkpointing raises a RuntimeError. Layers
    of `fp8.convert` and compiled code need none, and torch.compile supports none. With models of
    transformers: ``gradient_checkpointing_enable({"use_reentrant": False, "context_fn": ...})``.
    Outside of a block it does nothing.

    Returns:
        The context managers of the forward pass and of the recomputation.

    Raises:
        NotImplementedError: inside of a converted layer that keeps scales between passes, whose
            products the recomputation would number anew.
    """
    block: Block | None = FRAMES.items[-1].block
    if block is None:
        return nullcontext(), nullcontext()
    if block.state is not None:
        raise NotImplementedError(
            "a part of a converted layer that keeps scales between passes cannot be checkpointed: "
            "checkpoint the whole layer"
        )
    forward = _again(block) if block.off else nullcontext()
    return forward, _again(block)


def _again(block: Any) -> autocast:
    """A new autocast with the settings of ``block``, a `Block` or an autocast."""
    if block.recipe is None:
        return high_precision(block.off)
    # Under "auto" the products of unit-scaled functions have a recipe of their own.
    recipe = block.recipe if block.recipe is block.unit_recipe else AUTO
    return autocast(recipe, backend=block.backend)


@taken_as_constant
def _warn_left(name: str, why: str) -> bool:
    """Warns that a call is not cast; compiled code, while it is traced."""
    show(RecipeWarning, f"{name} stays in high precision under fp8.autocast: {why}")
    return True


def warn_of_operator(
    function: TorchFunction, args: Arguments, kwargs: Keywords
) -> None:
    """Warns of an operator of another library that may compute a product, of two floating-point
    tensors or more. ATen's operators are how these packages call torch without casts."""
    tensors = [
        t
        for t in (*args, *kwargs.values())
        if isinstance(t, Tensor) and t.is_floating_point()
    ]
    name = str(function)
    if len(tensors) > 1 and not name.startswith(("aten.", "fp8.")):
        _warn_left(
            name, "an operator of another library, whose products, if any, are not cast"
        )


def warn_of_function(args: Arguments) -> None:
    """Warns if the forward pass of an autograd function computes a product of ``args`` without
    gradients, but for a reentrant checkpoint, which runs its layers again."""
    if torch.compiler.is_dynamo_compiling() or in_reentrant():
        return
    if any(isinstance(t, Tensor) and t.grad_fn is not None for t in args):
        # late: for a warning
        from ..torch_internals.calling_function import function_around

        name = function_around()
        if name:
            show(
                RecipeWarning,
                f"{name} computes its gradients itself: products of its backward pass are cast if "
                "it runs layers again there, and not otherwise",
            )
