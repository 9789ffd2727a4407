"""`fp8.autocast`: every matrix product inside the block runs under a recipe.

It is a torch-function mode that intercepts the functions in PRODUCTS, whether they are called with
positional or keyword arguments, as a method or as an operator.

Under a policy, layers of a model may run under recipes of their own: while the block is open, hooks
of each such layer open a nested block around its forward.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from ..casts.counts import OPEN
from ..common.compiler import FIRST_LOOK, HIDDEN, called, reveal, taken_as_constant
from ..common.foreign import refuses_foreign
from ..common.threads import (
    Setting,
    Stack,
    checkpoints,
    function_around,
    in_recomputation,
    in_reentrant,
    is_from_graph,
)
from ..common.validation import check_name
from ..native.product import why_not_recipe
from ..products.active import (
    ACTIVE,
    IN_PIECES,
    NO_STATE,
    Block,
    checked_backend,
    index_of,
    is_graph_inside,
    product_recipe,
    running_task,
)
from ..recipes.history import LayerState
from ..recipes.policy import Policy, source_of
from ..recipes.recipe import AUTO, PLAIN, UNIT, Recipe, recipe_unless_auto
from ..selection.policies import resolve
from ..warnings import RecipeWarning, show
from .control_flow import run_within, runs_functions, within
from .dispatch import (
    EXPANDED,
    LEFT,
    OPAQUE,
    OPERATORS,
    PRODUCTS,
    SPECIAL,
    SPELLINGS,
    as_one_call,
    expansion,
    handler_of,
)

P = ParamSpec("P")
T = TypeVar("T")

HIDDEN.extend(SPELLINGS["grouped_mm"])


class _Stance(str):
    """A stance of torch.compile that is "force_eager" in threads that hold `STANCE`, and ``before``
    in others. The compiler compares it with the names of stances."""

    before = "default"
    __hash__ = str.__hash__

    def __eq__(self, name: object) -> bool:
        return name == ("force_eager" if _HOLDS.items else self.before)

    def __ne__(self, name: object) -> bool:
        return not self == name


def _set_stance() -> AbstractContextManager[Any]:
    stance = _Stance("force_eager")
    try:  # imports the compiler, as every optimizer does: torch.cond would import it otherwise
        context: Any = torch.compiler.set_stance(stance)
    except RuntimeError as error:
        raise RuntimeError(IN_PIECES) from error
    stance.before = context.prev.stance
    return cast("AbstractContextManager[Any]", context)


_HOLDS = Stack()
"""In each thread, one item for each time that it holds `STANCE`."""


class _EagerThread(Setting):
    """Holds torch.compile at its stance "force_eager" in the threads that hold it."""

    def hold(self) -> None:
        super().hold()
        _HOLDS.items.append(None)

    def release(self, *error: Any) -> None:
        _HOLDS.items.pop()
        super().release()

    __enter__, __exit__ = hold, release


STANCE = _EagerThread(_set_stance)


def outside_compiler(call: Callable[[], Any]) -> Any:
    """``call()`` without compilation in all of it, in this thread: a mode that is active in eager
    code would intercept again what was compiled under a mode."""
    if torch.compiler.is_dynamo_compiling():  # which traces no cached function
        return torch.compiler.disable(STANCE(call))()
    return _uncompiled()(call)


@functools.cache
def _uncompiled() -> Callable[[Callable[[], Any]], Any]:
    """Made once: the compiler wraps each function that it is disabled for."""
    return torch.compiler.disable(_held)


def _held(call: Callable[[], Any]) -> Any:
    with STANCE:
        return call()


class _Mode(TorchFunctionMode):
    """The torch-function mode of an open `autocast` block. Each entry creates a new one, because
    torch.compile does not call ``__enter__`` of a mode created outside of the graph."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        recipe = ACTIVE.blocks[-1].recipe if ACTIVE.blocks else None
        if recipe is None:
            return _uncast(function, args, kwargs)
        if function in SPECIAL or isinstance(function, OPERATORS):
            return self._special(recipe, function, args, kwargs)
        return called(function, args, kwargs)

    def _special(
        self,
        recipe: Recipe,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if function in EXPANDED:
            expanded = expansion(function, args, kwargs)
            if expanded is not None:
                return within((self, *FIRST_LOOK.items), expanded)()
        if (handler := handler_of(function)) is not None:
            if kwargs.get("out") is not None:
                if is_from_graph():
                    return function(*args, **kwargs)
                raise ValueError(_OUT)
            kwargs.pop("out", None)
            result = handler(product_recipe(), *args, **kwargs)
            if isinstance(result, str):
                _leave(function, result)
            elif result is not NotImplemented:
                return result if torch.is_grad_enabled() else warned(result, args)
        elif runs_functions(function):
            if function is checkpoint:
                _check_recomputes(recipe)
            return run_within(self, function, args, kwargs)
        elif function in OPAQUE:
            _leave(function, OPAQUE[function])
        elif function in LEFT:
            _warn_left(function.__name__, LEFT[function])
        elif isinstance(function, OPERATORS):
            warn_of_operator(function, args, kwargs)
        return called(function, args, kwargs)


def _uncast(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if function in PRODUCTS:
        product_recipe()  # raises if the block belongs to another task
        if is_graph_inside():
            return as_one_call(function, args, kwargs)
    return called(function, args, kwargs)


class autocast:
    """Runs every matrix product inside the block under ``recipe``.

    The gradients of the products are computed under the recipe wherever the backward pass runs.
    float16, bfloat16, float32 and float64 tensors are rounded in their own dtype. Products of
    integer, complex or sparse tensors are left unchanged, and so are products that sum over a
    single term (outer products, where a cast would round the result and save no work).

    The block belongs to the thread that opens it, and the innermost of nested blocks applies. It
    can be nested inside or outside of `torch.autocast`. Like that, it can decorate a function.

    A function that contains the block can be compiled, and a compiled function can be called in an
    open block, for which torch.compile compiles it anew.

    Activation checkpointing recomputes outside of the block and needs
    ``context_fn=fp8.checkpoint_contexts``, except for compiled code and layers of `fp8.convert`;
    without it, torch raises a CheckpointError. Reentrant checkpointing raises a RuntimeError.

    Args:
        recipe: a name in `fp8.RECIPES`, a `Recipe`, or "auto": "unit" for the products of the
            functions of `unit_scaling`, and so of unit-scaled models, and "tensor" for all others.
            Or a `fp8.Policy` without a switch (`fp8.Policy.at`). Its rules and exceptions concern
            the layers of ``model``; products outside of them run under the policy's own recipe.
        opaque: the action at a call whose products cannot be intercepted (OPAQUE, and an einsum
            with a repeated index). "raise" raises a NotImplementedError that names the call; "warn"
            leaves it in high precision.
        backend: "simulate" computes from rounded operands in the dtype of the tensors. "native"
            uses torch's kernels for products of two matrices of supported sizes
            (`fp8.native.product.fits`) and simulates the others; operands are saved in one byte or
            half a byte per element. It warns with a RuntimeWarning, and simulates, if this device
            has no kernels for the recipe or none that passes the self-test (`fp8.native.selftest`).
            "auto" is "native" on CUDA devices.
        enabled: False computes as torch does, whatever the recipe and the surrounding blocks, in
            layers of `fp8.convert` too.
        model: the model whose layers a policy selects; not used otherwise. Such a block cannot be
            compiled: use `fp8.convert`.

    Raises:
        NotImplementedError: if torch.compile traces a block with a policy that selects layers.
        ValueError: if a recipe keeps scales between passes ("delayed", "static"), which belong to
            the layers of `fp8.convert`, or if ``backend`` is "native" and the recipe has no
            kernels.

    >>> import torch, fp8
    >>> x, w = torch.tensor([[1.06, 2.0]]), torch.tensor([[1.0, 1.0]])
    >>> with fp8.autocast("unit"):
    ...     y = torch.nn.functional.linear(x, w)
    >>> y  # 1.06 is rounded to 1.0
    tensor([[3.]])
    """

    #: The state of the converted layer whose block it is.
    state: LayerState | None = None

    @refuses_foreign("fp8.autocast")
    def __init__(
        self,
        recipe: str | Recipe | Policy = AUTO,
        *,
        opaque: str = "raise",
        backend: str = "simulate",
        enabled: bool = True,
        model: nn.Module | None = None,
    ) -> None:
        check_name("opaque", opaque, ("raise", "warn"))
        #: Whether converted layers inside run in high precision too.
        self.off = not enabled
        layers: _Layers = {}
        source, casts = recipe, True
        if isinstance(recipe, Policy):
            layers = _layers_by_policy(recipe, model) if enabled else {}
            source, casts = source_of(recipe.recipe) or AUTO, recipe.recipe is not None
            enabled = enabled and (casts or bool(layers))
        explicit = recipe_unless_auto(source)  # type: ignore[arg-type]
        base = explicit or PLAIN
        for each in (base, *filter(None, layers.values())) if enabled else ():
            if each.keeps_history and self.state is None:
                raise ValueError(NO_STATE.format(each.name))
        casts = casts and enabled
        self.recipe = base if casts else None
        #: The recipe of products of unit-scaled functions.
        self.unit_recipe = (explicit or UNIT) if casts else None
        #: The layers that have recipes of their own, and their hooks while the block is open.
        self.layers = layers
        self._hooks: list[Any] = []
        self._entries = 0
        #: The layer whose hook opened the block, if any.
        self.layer: nn.Module | None = None
        self.opaque = opaque
        self.backend = checked_backend(backend, base) if enabled else "simulate"
        self._asked = backend
        #: Whether a recomputation in the backward pass opens the block again by itself.
        self.reenters = False

    def __enter__(self) -> autocast:
        if self.layers:
            _check_eager()
            self._entries += 1
            for layer, recipe in self.layers.items() if self._entries == 1 else ():
                before = layer.register_forward_pre_hook(_before(self, recipe))
                self._hooks += [before, layer.register_forward_hook(_after, always_call=True)]
        eager = not torch.compiler.is_dynamo_compiling()
        if self.recipe is not None and self.recipe.changes_scales and in_recomputation():
            _check_recomputes(self.recipe)
        reveal()
        if eager and not self.reenters:
            OPEN.check = None
        modes = (_Mode(), *FIRST_LOOK.items)
        again = self.reenters or in_reentrant()  # opened inside of a recomputed segment
        ACTIVE.blocks.append(
            Block(
                recipe=self.recipe,
                unit_recipe=self.unit_recipe,
                opaque=self.opaque,
                modes=modes,
                state=self.state,
                backend=self.backend,
                reenters=again,
                opened=self if eager else None,
                off=self.off,
                checkpoints=checkpoints() if self.off else 0,
                task=running_task() if eager else None,
            )
        )
        for mode in modes:
            TorchFunctionMode.__enter__(mode)
        return self

    def __exit__(self, *error: Any) -> None:
        if self.layers:
            self._entries -= 1
            while self._hooks and not self._entries:
                self._hooks.pop().remove()
        index = -1 if torch.compiler.is_dynamo_compiling() else index_of(self)
        block = ACTIVE.blocks.pop(index)
        for mode in reversed(block.modes):
            TorchFunctionMode.__exit__(mode, *error)
        if torch.compiler.is_dynamo_compiling():
            return
        if index < len(ACTIVE.blocks):
            raise RuntimeError(_NOT_NESTED)

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        """Wraps ``function`` so that each call runs in the block. Raises TypeError for a generator
        or coroutine function, whose body runs after the call returns."""
        if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
            raise TypeError(f"{function.__name__} goes on after its call: open the block inside")

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


def high_precision() -> autocast:
    """A block whose products are not cast, and in which converted layers do as outside of it."""
    block = autocast(enabled=False)
    block.off = bool(ACTIVE.blocks) and ACTIVE.blocks[-1].off
    return block


# Layers with recipes of their own

_Layers = dict[nn.Module, Recipe | None]


def _layers_by_policy(policy: Policy, model: nn.Module | None) -> _Layers:
    """The layers of ``model`` that do not take the policy's own recipe -> the recipe of each."""
    if policy.switch:
        raise ValueError(
            "fp8.autocast does not know how much of the training is done: pass policy.at(fraction) "
            "instead of a policy with a switch"
        )
    if not policy.selects:
        return {}
    _check_eager()
    if not isinstance(model, nn.Module):
        raise ValueError(
            "a policy that selects layers (rules, first, last, keep) needs their names: "
            f"fp8.autocast(policy, model=model), not model={model!r}"
        )
    base = source_of(policy.recipe)
    return {
        model.get_submodule(name): decision.recipe
        for name, decision in resolve(policy, model, every=True).items()
        if any(source != base for source in decision.sources)
    }


def _check_eager() -> None:
    if torch.compiler.is_compiling():
        raise NotImplementedError(
            "fp8.autocast with a policy that selects layers cannot be compiled: use "
            "fp8.convert(model, policy)"
        )


def _before(block: autocast, recipe: Recipe | None) -> Callable[..., None]:
    def before(module: nn.Module, args: Any) -> None:
        _check_eager()
        if _innermost() is not block:  # another thread, or a block inside
            return
        nested = high_precision()
        if recipe is not None:
            backend = "simulate" if why_not_recipe(recipe) else block._asked
            nested = autocast(recipe, opaque=block.opaque, backend=backend)
        nested.layer = module
        nested.__enter__()

    return before


def _after(module: nn.Module, args: Any, output: Any) -> None:
    innermost = _innermost()
    if getattr(innermost, "layer", None) is module:
        innermost.__exit__(None, None, None)


def _innermost() -> Any:
    return ACTIVE.blocks[-1].opened if ACTIVE.blocks else None


_NOT_NESTED = (
    "fp8.autocast: another block was opened inside of this one and is still open; blocks are "
    "closed innermost first: close those of a generator or a coroutine before it yields or awaits"
)


def _check_recomputes(recipe: Recipe) -> None:
    if recipe.changes_scales:
        raise NotImplementedError(
            f"recipe {recipe.name!r} cannot be checkpointed with use_reentrant=False: the "
            'recomputation would use other scales, because scaling "delayed" has updated them'
        )


def checkpoint_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The ``context_fn`` for `torch.utils.checkpoint.checkpoint` inside of `fp8.autocast`.

    The recomputation in the backward pass runs under the recipe of the forward pass:

        checkpoint(block, x, use_reentrant=False, context_fn=fp8.checkpoint_contexts)

    With models of the library transformers, use
    ``model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": ...})``. Outside of
    a block it does nothing. torch.compile does not support a ``context_fn`` of this kind and needs
    none.

    Returns:
        The context managers of the forward pass and of the recomputation.

    Raises:
        NotImplementedError: inside of a converted layer that keeps scales between passes, whose
            products the recomputation would number anew.
    """
    if not ACTIVE.blocks:
        return nullcontext(), nullcontext()
    block = ACTIVE.blocks[-1]
    if block.state is not None:
        raise NotImplementedError(
            "a part of a converted layer that keeps scales between passes cannot be checkpointed: "
            "checkpoint the whole layer"
        )
    return _again(block) if block.off else nullcontext(), _again(block)


def _again(block: Any) -> autocast:
    """A new autocast with the settings of ``block``, a `Block` or an autocast."""
    opened = block.opened if isinstance(block, Block) and block.opened else block
    if block.recipe is None:
        again = autocast(enabled=False)
        again.off = block.off
    else:
        auto = block.recipe is not block.unit_recipe
        recipe = AUTO if auto else block.recipe
        again = autocast(recipe, opaque=block.opaque, backend=block.backend)
    if isinstance(opened, autocast):
        again.layers, again._asked = opened.layers, opened._asked
    return again


def _leave(function: Callable[..., Any], why: str) -> None:
    if ACTIVE.blocks[-1].opaque == "raise":
        raise NotImplementedError(_CANNOT.format(function.__name__, why))
    _warn_left(function.__name__, why)


@taken_as_constant
def _warn_left(name: str, why: str) -> bool:
    """Warns that a call is not cast; compiled code, while it is traced."""
    show(RecipeWarning, _LEFT.format(name, why))
    return True


_OUT = "a product under fp8.autocast cannot write to out=; assign its result"
_CANNOT = "{} cannot run under fp8.autocast: {}"
_LEFT = "{} stays in high precision under fp8.autocast: {}"


def warn_of_operator(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> None:
    """Warns of an operator of another library that may compute a product, of two floating-point
    tensors or more. ATen's operators are how these packages call torch without casts."""
    tensors = [
        t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and t.is_floating_point()
    ]
    if len(tensors) > 1:
        _show_operator(str(function))


@taken_as_constant
def _show_operator(name: str) -> bool:
    if not name.startswith(("aten.", "fp8.")):
        show(RecipeWarning, _OPERATOR.format(name))
    return True


def warned(result: Any, args: tuple[Any, ...]) -> Any:
    """``result``, of a product of ``args`` without gradients. Warns if the forward pass of an
    autograd function computes it, but for a reentrant checkpoint, which runs its layers again."""
    if torch.compiler.is_dynamo_compiling() or in_reentrant():
        return result
    if any(isinstance(t, Tensor) and t.grad_fn is not None for t in args):
        name = function_around()
        if name:
            show(RecipeWarning, _BACKWARD.format(name))
    return result


_OPERATOR = (
    "{} is an operator that fp8.autocast does not know: if it computes products, they are not cast"
)
_BACKWARD = (
    "{} computes its gradients itself: products of its backward pass are cast if it runs layers "
    "again there, and not otherwise"
)
