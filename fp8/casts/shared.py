"""One cast of an input that several layers read: the projections q, k and v, or gate and up.

Eager code remembers the last input that was cast, and what its product has made of it. The next
products of this input take that: it is cast once, and one copy is saved for the backward pass. In
graphs the compiler merges equal casts.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..common.compiler import compiled_as
from ..recipes.cast import Cast

if TYPE_CHECKING:
    from .operands import States

Parts = dict[str, Any]
"""What a product has made of its input, by name."""


class _Last(threading.local):
    """The last cast that can be shared: its key, a reference to the input, and the parts, which are
    dropped when the input is freed."""

    key: tuple[object, ...] = ()
    source: weakref.ref[Tensor] | None = None
    parts: Parts = {}  # noqa: RUF012


_LAST = _Last()


@compiled_as(lambda x, cast, states, kind: {})
def shared_parts(
    x: Tensor, cast: Cast, states: States, kind: tuple[object, ...]
) -> Parts:
    """What the last product has made of ``x``, if that is unchanged, under equal constants and an
    equal scale; otherwise nothing yet, to be filled by this product.

    Shared are the casts of what a recorded operation has computed: torch counts changes of its
    memory. A leaf may be a buffer that others write into.

    Args:
        x: the input of a product.
        cast: of the input.
        states: of the product.
        kind: what else the cast, or what is made of it, depends on.
    """
    source = x._base
    if source is None:
        source = x
    scale, look = states.a, states.look
    if source.grad_fn is None or cast.is_random:
        return {}
    if look is not None and not look.is_spot:
        return {}
    number: object = None
    if scale is not None:
        if scale.dim():  # not set, or a history
            return {}
        number = id(scale), scale._version
        if type(scale) is Tensor and scale.device.type == "cpu":
            number = float(scale)
    if torch.func.debug_unwrap(x) is not x:
        return {}
    autocast = torch.is_autocast_enabled(x.device.type)
    place = x.shape, x.stride(), x.storage_offset(), source._version
    key = (*place, x.dtype, autocast, number, *kind)
    last = _LAST.source
    if last is None or last() is not source or key != _LAST.key:
        parts: Parts = {}
        _LAST.key, _LAST.parts = key, parts
        _LAST.source = weakref.ref(source, lambda _: parts.clear())
    return _LAST.parts
