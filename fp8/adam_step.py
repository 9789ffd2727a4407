"""The arithmetic of Adam on tensors in any encodings, which eager mode does operation by operation
and `torch.compile` in one pass."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .moments import Encoding, Stored, decode, write
from .optim_state import FIRST, MASTER, SECOND
from .random_bits import Key, bits_from_key, fewer_bits

__all__ = ["ROOM", "How", "Room", "adam", "adam_compiled"]

HALF = 15
"""Random bits for each of the two moments, from one word of 32."""


class How(NamedTuple):
    """How the weight and the moments are kept, and which of them are rounded stochastically."""

    weight: Encoding
    first: Encoding
    second: Encoding
    stochastic: tuple[bool, bool, bool]

    @property
    def in_blocks(self) -> bool:
        """Whether a moment has a scale for each block."""
        return "block" in (self.first.scale, self.second.scale)

    @property
    def by_name(self) -> tuple[tuple[str, Encoding], ...]:
        """The encodings, with the names in a state."""
        return (MASTER, self.weight), (FIRST, self.first), (SECOND, self.second)


Kept = tuple[Stored, Stored, Stored]
"""The weight and the moments."""


class Room(threading.local):
    """The memory of the copies in float32, at most `fp8.adam.COMPILED` numbers. It stays with the
    thread: memory that is new at each step costs as much as half of the step."""

    numbers = torch.empty(0, device="cpu")

    def of(self, rows: int, columns: int) -> Tensor:
        if torch.compiler.is_compiling():  # which is not to depend on what this thread has done
            return torch.empty(rows, columns)
        if len(self.numbers) < rows * columns:
            self.numbers = torch.empty(rows * columns, dtype=torch.float32, device="cpu")
        return self.numbers[: rows * columns].view(rows, columns)


ROOM = Room()


def adam_compiled(
    kept: Kept, old: list[Tensor], room: Tensor, numbers: Tensor, how: How, keys: list[Key]
) -> Tensor:
    """`adam`, compiled. On a CPU it reads what has 16 bits from a copy in ``room``: loops that
    torch compiles for AVX-512 read 16-bit numbers under masks; such loads are not prefetched, and
    wait for what was stored under masks just before."""
    rows = iter(room)
    for i, x in enumerate(old):
        if x.element_size() == 2 and (row := next(rows, None)) is not None:
            old[i] = row[: len(x)].copy_(x)
    device = old[0].device
    words = [torch.as_tensor(key, device=device) for key in keys]  # ints compile anew
    step = _compiled(False if device.type == "cpu" and how.in_blocks else None)
    return step(kept, old, numbers, how, words)


def adam(
    kept: Kept, old: Sequence[Tensor], numbers: Tensor, how: How, keys: Sequence[Key]
) -> Tensor:
    """Adam (Kingma and Ba, arXiv:1412.6980, algorithm 1) with decoupled decay, of ``kept``. Its
    values, and the gradient, are read from ``old``: the same tensors, or copies. (Not views of
    them: what shares memory must be one tensor to a compiler.)

        m = b1 m + (1 - b1) g,  v = b2 v + (1 - b2) g^2
        w = decay w - size m / (root sqrt(v) + eps)

    In float32, from the new moments before they are rounded. old: (n,) each. numbers: (11,), those
    of the formulas and 1 / scale of the three. Returns the largest magnitude of a weight that has a
    scale, else 0.
    """
    weight, first, second = (s._replace(values=x) for s, x in zip(kept, old, strict=False))
    decay, b1, c1, b2, c2, size, root, eps, *units = numbers.unbind()
    g = old[3].to(torch.float32)
    m = decode(first) * b1 + g * c1
    v = decode(second) * b2 + g * g * c2
    w = decode(weight) * decay - m * size / (v.sqrt() * root + eps)
    bits = low = high = None
    of_weight, of_first, of_second = how.stochastic
    if of_first or of_second:
        word = bits_from_key(g.shape, keys[0], device=g.device)
        high = fewer_bits(word, HALF) if of_first else None
        low = fewer_bits(word << 16, HALF) if of_second else None
    if of_weight:
        bits = bits_from_key(g.shape, keys[1], device=g.device)
    write(w, kept[0], how.weight, units[0], bits=bits)
    write(m, kept[1], how.first, units[1], bits=high)
    write(v, kept[2], how.second, units[2], away=True, bits=low)
    return w.abs().amax() if how.weight.scale == "tensor" else w.new_zeros(())


@functools.cache
def _compiled(dynamic: bool | None) -> Callable[..., Tensor]:
    skip = torch.compiler.skip_guard_on_globals_unsafe  # no function of this package changes
    return torch.compile(adam, dynamic=dynamic, options={"guard_filter_fn": skip})
