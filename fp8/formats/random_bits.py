"""Counter-based random bits: a hash of a key and the position of an element, by integer arithmetic
of torch alone: the same in eager and compiled code on every device.

`drawn_key` draws the key of a cast without a seed: a hash of the state of torch's CPU generator, in
which it then counts the draw in bits that no random number is computed from. So all numbers that
torch draws (a dropout mask) are those without the cast; and what seeds, saves or restores that
generator (`torch.manual_seed`, `fork_rng`, an activation checkpoint, a resumed run) does so for
casts.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..common.compiler import compiled_as
from ..torch_internals.decorators import taken_as_constant

Word = TypeVar("Word", int, Tensor)
Seed = int | Tensor | Sequence[int | Tensor]

Key = int | Tensor
"""64 random bits as a signed integer: see `random_key`."""

#: Multipliers of `triple32` as int32, with shifts 17, 11, 15, 14: the 32-bit mixer with the
#: smallest avalanche bias of Wellons' search (https://github.com/skeeto/hash-prospector).
FIRST, SECOND, THIRD = (0xED5AD4BB - 2**32, 0xAC4C1B51 - 2**32, 0x31848BAB)

#: The multiplier that combines the parts of a seed, from Knuth's MMIX generator.
KEY_STEP = 0x5851F42D4C957F2D

#: The initial value of a key: the first 64 bits of the fraction of pi.
KEY_START = 0x243F6A8885A308D3

#: Elements are numbered within blocks of 2**31, so that an index is a nonnegative int32.
INDEX_BITS = 31


def _wrap(word: Word) -> Word:
    """A Python int modulo 2**64, as int64 tensor arithmetic wraps anyway."""
    if isinstance(word, Tensor):
        return word
    return ((word + 2**63) & (2**64 - 1)) - 2**63


def _mix64(word: Word) -> Word:
    """Stafford's variant 13 of the murmur finaliser, as in SplitMix64, in signed integers."""
    word = _wrap((word ^ ((word >> 30) & (2**34 - 1))) * (0xBF58476D1CE4E5B9 - 2**64))
    word = _wrap((word ^ ((word >> 27) & (2**37 - 1))) * (0x94D049BB133111EB - 2**64))
    return word ^ ((word >> 31) & (2**33 - 1))


def random_key(seed: Seed) -> Key:
    """A 64-bit key from a seed as `quantize` describes it: an int, or a 0-dim int64 tensor of the
    same value if the seed contains a tensor. Raises TypeError and ValueError for other seeds."""
    parts = list(seed) if isinstance(seed, Sequence) else [seed]
    for part in parts:
        _check_seed(part)
    tensors = [part for part in parts if isinstance(part, Tensor)]
    word: Any = KEY_START
    if tensors or torch.compiler.is_compiling():
        # In compiled code an int may be symbolic, which bitwise operators do not support.
        device = tensors[0].device if tensors else None
        word = torch.full((), KEY_START, dtype=torch.int64, device=device)
    # Mixed once, at the end: inductor's compile time is exponential in a chain of steps that use
    # their operand twice.
    for part in parts:
        word = _wrap(word * KEY_STEP + part)
    return _mix64(_wrap(word * KEY_STEP))


def _check_seed(part: object) -> None:
    if isinstance(part, Tensor):
        if part.dtype != torch.int64 or part.ndim != 0:
            got = f"{part.dtype}, {tuple(part.shape)}"
            raise TypeError(f"a seed tensor is 0-dim int64, got {got}")
    elif isinstance(part, bool) or not isinstance(part, int | torch.SymInt):
        needs = "an int, a 0-dim int64 tensor or several"
        raise TypeError(f"a seed is {needs}, got {part!r}")
    elif not -(2**63) <= part < 2**63:
        raise ValueError(f"seed {part} does not fit into 64 bits")


def _shift(bits: Tensor, by: int) -> Tensor:
    """Logical right shift of int32 (torch's own shift copies the sign)."""
    return (bits >> by).bitwise_and_((1 << (32 - by)) - 1)


def bits_from_key(
    shape: Sequence[int],
    key: Key,
    *,
    device: torch.device,
    start: int = 0,
) -> Tensor:
    """int32 random bits: a hash of `key` and the row-major index, from `start`."""
    count = math.prod(shape)
    first = (key + 2**31) % 2**32 - 2**31
    second = key >> 32
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        first = first.to(torch.int32)
        second = second.to(torch.int32)
    if start + count <= 1 << INDEX_BITS:
        z = torch.arange(start, start + count, dtype=torch.int32, device=device)
    else:
        index = torch.arange(start, start + count, device=device)
        z = (index & ((1 << INDEX_BITS) - 1)).to(torch.int32)
        blocks = (index >> INDEX_BITS).to(torch.int32)
        second = blocks.mul_(FIRST).bitwise_xor_(second)
    z = z ^ first
    z = z.bitwise_xor_(_shift(z, 17)).mul_(FIRST).add_(second)
    z = z.bitwise_xor_(_shift(z, 11)).mul_(SECOND)
    z = z.bitwise_xor_(_shift(z, 15)).mul_(THIRD)
    return z.bitwise_xor_(_shift(z, 14)).view(shape)


def key_at(key: Key, start: int) -> Key:
    """The key whose bits at index 0 equal the bits of ``key`` at ``start``, a multiple of a power
    of two between the number of elements and 2**31."""
    block, index = divmod(start, 1 << INDEX_BITS)
    return key ^ _wrap(index ^ (block * FIRST % 2**32 << 32))


def fewer_bits(bits: Tensor, count: int) -> Tensor:
    """The first `count` of the 31 bits, then the midpoint of the missing ones."""
    if count == 31:
        return bits
    return (bits & (2**31 - 2 ** (31 - count))) | 2 ** (30 - count)


# Keys without a seed

#: The bits that count, of the first of the 624 words of a state. The Mersenne Twister (Matsumoto
#: and Nishimura 1998) has 19937 bits of state: it computes the next 624 words from the highest bit
#: of the first word and all of the others, and torch does so before it returns the first word.
_UNREAD = 2**31 - 1

#: In a state of torch's CPU generator, as int64: the position, and the first words.
_WORDS = slice(2, 6)

_LOCK = threading.Lock()
_NUMBERS = itertools.count()


def _draw() -> int:
    """A key; the next call returns another one. As a draw from the generator, it raises
    RuntimeError inside of `torch.vmap` unless its randomness is "same"."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a CUDA graph would repeat the random bits of a cast at each replay: cast to nearest "
            "in it, or give quantize(seed=) a tensor that changes"
        )
    # Raises in `torch.vmap`, which refuses random numbers, and draws none elsewhere.
    int(torch.randperm(1, device="cpu"))
    with _LOCK:
        state = torch.default_generator.get_state()
        words = state.numpy().view(np.int64)[_WORDS]
        position, first, *others = words.tolist()
        words[1] = first & ~_UNREAD | (first + 1) & _UNREAD
        torch.default_generator.set_state(state)
    key = random_key((position, first, *others))
    assert isinstance(key, int)
    return key


# Every graph draws the key on the CPU: what recomputes a segment of a graph restores the generator
# of that device. number: makes calls differ, of which the compiler would leave one.
@torch.library.custom_op(
    "fp8::random_key",
    mutates_args=(),
    schema="(int number, *, Device device) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),
)
def _random_key(number: int, *, device: torch.device) -> Tensor:
    return torch.tensor(_draw(), device=device)


@_random_key.register_fake
def _(number: int, *, device: torch.device) -> Tensor:
    return torch.empty((), dtype=torch.int64, device=device)


@taken_as_constant
def _number() -> int:
    return next(_NUMBERS)


def _key_in_graph(device: torch.device) -> Tensor:
    key = torch.ops.fp8.random_key(_number(), device=torch.device("cpu"))
    return key.to(device, non_blocking=True)  # from pageable memory: no synchronization


@compiled_as(_key_in_graph)
def drawn_key(device: torch.device) -> Key:
    """A key for a tensor on ``device``, as the state of torch's CPU generator decides it."""
    return _draw()
