"""`fp8.autocast`: every matrix product inside the block runs under a recipe.

A torch-function mode over the calls in PRODUCTS, in whatever form they are written: positional,
keyword, method or operator.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .history import AmaxHistory
from .matmul import ACTIVE, active_recipe
from .products import EXPANDED, OPAQUE, PRODUCTS
from .recipe import Recipe, get_recipe

__all__ = ["EXPANDED", "FIRST_LOOK", "OPAQUE", "PRODUCTS", "autocast", "outside_compiler"]

# Modes that must see each call before any autocast does (the plan of a unit-scaled model), in the
# order they were entered. An autocast that starts inside one puts it back on top.
FIRST_LOOK: list[TorchFunctionMode] = []


def _forced_eager(call: Callable[[], Any]) -> Any:
    with torch.compiler.set_stance("force_eager"):
        return call()


def outside_compiler(call: Callable[[], Any]) -> Any:
    """``call()`` with nothing in it compiled, from the frame up or by itself.

    The code that a compiler makes of a call under a mode has the mode in it already, and meets it
    again when it runs. So while a mode is active in eager code, all is eager.
    """
    if "torch._dynamo" not in sys.modules:  # nothing is compiled yet, and importing it is slow
        return call()
    return torch.compiler.disable(_forced_eager)(call)


class _EagerStance:
    """torch.compile held at its stance "force_eager" while a block is open in eager code.

    The stance belongs to the process, so blocks of several threads share one change of it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks = 0
        self._stance: Any = None

    def hold(self) -> None:
        with self._lock:
            if self._stance is None and "torch._dynamo" in sys.modules:
                try:
                    self._stance = torch.compiler.set_stance("force_eager")
                except RuntimeError as error:
                    raise RuntimeError(
                        "fp8.autocast was entered by a function that torch.compile could not "
                        "compile in one piece (a graph break): compile it with fullgraph=True to "
                        "see where"
                    ) from error
            self._blocks += 1

    def release(self) -> None:
        with self._lock:
            self._blocks -= 1
            if self._blocks == 0 and self._stance is not None:
                self._stance.__exit__(None, None, None)
                self._stance = None


_STANCE = _EagerStance()


class autocast(TorchFunctionMode):
    """Within the block, every matrix product runs under ``recipe``.

    recipe: a name in `fp8.RECIPES` or a `Recipe`. Of nested blocks the innermost counts.
    opaque: what to do at a call whose products cannot be reached (OPAQUE; under a scaling by rows
    or blocks bilinear too, and an einsum of three operands): "raise" a NotImplementedError that
    names it, or "warn" and leave it in high precision.
    history: what a recipe with scaling "delayed" remembers, an `fp8.AmaxHistory`; a ValueError asks
    for it. Others do not read it.

    The gradients of the products are computed under the recipe wherever the backward pass is run.
    float16, bfloat16, float32 and float64 tensors are rounded in their own dtype; integer, complex
    and sparse products, and those that sum over a single term (outer products, which would round
    their result and save no work), are left as they are.
    The block belongs to the thread that opens it. It may be inside `torch.autocast` or around it.
    To compile, compile the function that contains the block: while a block is open in eager code,
    what was compiled before runs in eager mode, so that no product is cast twice.
    Activation checkpointing recomputes outside of the block, wherever backward is called: the
    non-reentrant kind raises a CheckpointError then, the reentrant kind notices nothing and
    computes gradients from operands that were not cast.

    >>> import torch, fp8
    >>> x, w = torch.tensor([[1.06, 2.0]]), torch.tensor([[1.0, 1.0]])
    >>> with fp8.autocast("unit"):
    ...     y = torch.nn.functional.linear(x, w)
    >>> y  # 1.06 is rounded to 1.0
    tensor([[3.]])
    """

    def __init__(
        self,
        recipe: str | Recipe = "unit",
        *,
        opaque: str = "raise",
        history: AmaxHistory | None = None,
    ) -> None:
        super().__init__()
        if opaque not in ("raise", "warn"):
            raise ValueError(f"opaque must be 'raise' or 'warn', not {opaque!r}")
        self.recipe = get_recipe(recipe)
        if self.recipe.keeps_history and not isinstance(history, AmaxHistory):
            raise ValueError(
                f'recipe {self.recipe.name!r} has scaling "delayed": give it a place to remember, '
                f"history=fp8.AmaxHistory(), not {history!r}"
            )
        self.opaque = opaque
        self.history = history

    def __enter__(self) -> autocast:
        if not torch.compiler.is_compiling():
            _STANCE.hold()
        above = FIRST_LOOK[-1] if FIRST_LOOK else None
        ACTIVE.blocks.append((self.recipe, self.opaque, above, self.history, [0]))
        super().__enter__()
        if above is not None:
            TorchFunctionMode.__enter__(above)
        return self

    def __exit__(self, *error: Any) -> None:
        above = ACTIVE.blocks.pop()[2]
        if above is not None:
            TorchFunctionMode.__exit__(above, *error)
        super().__exit__(*error)
        if not torch.compiler.is_compiling():
            _STANCE.release()

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        handler = PRODUCTS.get(function)
        if handler is not None:
            result = handler(active_recipe(), *args, **kwargs)
            if isinstance(result, str):
                _leave(function, result)
            elif result is not NotImplemented:
                return result
        elif function in EXPANDED:
            with self:
                return EXPANDED[function](*args, **kwargs)
        elif function in OPAQUE:
            _leave(function, OPAQUE[function])
        return function(*args, **kwargs)


def _leave(function: Callable[..., Any], why: str) -> None:
    """Says that a call is not cast, as the innermost block wants it."""
    message = f"{function.__name__} cannot run under fp8.autocast: {why}"
    if ACTIVE.blocks[-1][1] == "raise":
        raise NotImplementedError(message)
    warnings.warn(f"{message}; left in high precision", stacklevel=4)
