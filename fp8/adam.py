"""One step of Adam over tensors in any encodings: what goes into it, and its arithmetic, which
eager mode does piece by piece and `torch.compile` in one pass."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .moments import BLOCK, ENCODINGS, HEADROOM, Encoding, Stored, decode, scales_for, write
from .optim_state import (
    FIRST,
    MASTER,
    SECOND,
    Group,
    State,
    everywhere,
    is_plain,
    local,
    names,
    read,
    start,
)
from .quantize import CHUNK
from .rounding import Key, bits_from_key, fewer_bits, random_key

__all__ = ["PLAIN", "step_units", "units_of"]

LARGEST = torch.finfo(torch.float32).max ** 0.5
"""A gradient beyond this has no square in float32."""

PLAIN = {
    torch.float32: ENCODINGS["float32"],
    torch.bfloat16: ENCODINGS["bfloat16"],
    torch.float16: Encoding(
        name="float16", dtype=torch.float16, format=ENCODINGS["float16"].format
    ),
}
"""How weights without a master are kept, by their dtype."""

COMPILED = 1 << 20
"""Elements that a compiled step takes at once on a CPU, so that copies of them stay in cache."""

HALF = 15
"""Random bits for each of the two moments, from one word of 32."""


class _How(NamedTuple):
    """How the weight and the moments are kept, and which of them are rounded stochastically."""

    weight: Encoding
    first: Encoding
    second: Encoding
    stochastic: tuple[bool, bool, bool]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Unit:
    """What is stepped together: one parameter, or small ones of a group as one tensor.

    index: of the first, among all parameters of the optimizer, for random bits of its own.
    """

    parameters: list[Tensor]
    states: list[State]
    group: Group
    decoupled: bool
    index: int

    @functools.cached_property
    def encodings(self) -> dict[str, Encoding]:
        """Of the weight and the moments, by name."""
        kept = names(self.parameters[0], self.group)
        parameter = local(self.parameters[0])
        plain = PLAIN[parameter.dtype if is_plain(parameter) else torch.float32]
        return {MASTER: plain, **kept}

    def kept(self, name: str) -> Stored:
        """A moment or the master, flat; of one parameter it shares memory with the state."""
        if len(self.states) == 1:
            return read(self.states[0], name)
        return Stored(torch.cat([read(state, name).values for state in self.states]))

    def weight(self) -> Stored:
        """What is stepped: masters, the weight itself, or a copy of the weights."""
        if MASTER in names(self.parameters[0], self.group):
            return self.kept(MASTER)
        here = [local(parameter.detach()) for parameter in self.parameters]
        if len(here) == 1 and is_plain(here[0]):
            return Stored(here[0].view(-1))
        dtype = self.encodings[MASTER].dtype
        return Stored(torch.cat([x.to(dtype).reshape(-1) for x in here]))

    def gradient(self) -> Tensor:
        """What Adam sees, flat: of what is maximized the negative, with the decay that is L2."""
        here = [local(parameter.grad.detach()) for parameter in self.parameters]  # type: ignore[union-attr]
        flats = [(x if is_plain(x) else x.to(torch.float32)).reshape(-1) for x in here]
        grad = flats[0] if len(flats) == 1 else torch.cat(flats)
        if self.group["maximize"]:
            grad = -grad
        if self.group["weight_decay"] and not self.decoupled:
            grad = grad.to(torch.float32) + self.group["weight_decay"] * decode(self.weight())
        return grad

    def numbers(self) -> Tensor:
        """The scalars of a step, (8,), each computed in float64 and rounded once."""
        group = self.group
        step, (b1, b2), lr = float(self.states[0]["step"]), group["betas"], float(group["lr"])
        decay = 1 - lr * group["weight_decay"] if self.decoupled else 1.0
        size, root = lr / (1 - b1**step), (1 - b2**step) ** -0.5
        return torch.tensor([decay, b1, 1 - b1, b2, 1 - b2, size, root, group["eps"]])

    @functools.cached_property
    def how(self) -> _How:
        """How the weight and the moments are kept and rounded."""
        weight, *moments = (self.encodings[name] for name in (MASTER, FIRST, SECOND))
        first, second = (
            e.rounds_stochastically(beta)
            for e, beta in zip(moments, self.group["betas"], strict=True)
        )
        of_weight = self.group["stochastic_weights"] and weight.dtype != torch.float32
        return _How(weight, *moments, (of_weight, first, second))

    def keys(self) -> list[Key]:
        """Of the random bits of this step: for the moments, and for the weight."""
        seed = (self.group["seed"], int(self.states[0]["step"]), self.index)
        return [random_key((*seed, stream)) for stream in range(2)]

    def finish(self, weight: Stored, first: Stored, second: Stored) -> None:
        """Writes what was stepped to where it comes from."""
        master = MASTER in names(self.parameters[0], self.group)
        joined = len(self.states) > 1
        if joined:
            kept = {FIRST: first, SECOND: second, **({MASTER: weight} if master else {})}
            for name, stored in kept.items():
                _split(stored.values, [read(state, name).values for state in self.states])
        here = [local(parameter.detach()) for parameter in self.parameters]
        if joined or master or not is_plain(here[0]):
            _split(decode(weight) if master else weight.values, here)


def _split(flat: Tensor, targets: list[Tensor]) -> None:
    for target, piece in zip(targets, flat.split([t.numel() for t in targets]), strict=True):
        target.copy_(piece.view(target.shape))


def units_of(group: Group, states: dict[Any, State], index: int, decoupled: bool) -> list[_Unit]:
    """The parameters of a group that have a gradient; those without a state get one.

    index: of the first among all parameters of the optimizer.
    Raises RuntimeError for a sparse gradient.
    """
    found: dict[Any, _Unit] = {}
    for number, parameter in enumerate(group["params"], index):
        if parameter.grad is None:
            continue
        if parameter.grad.layout != torch.strided:
            raise RuntimeError(f"Adam needs dense gradients, got {parameter.grad.layout}")
        state = states[parameter]
        if not state:
            state.update(start(parameter, group))
        key: Any = number
        if parameter.numel() < group["min_size"]:
            plain = is_plain(local(parameter)) and parameter.dtype
            key = (float(state["step"]), parameter.device, plain)
        if key not in found:
            found[key] = _Unit(
                parameters=[], states=[], group=group, decoupled=decoupled, index=number
            )
        found[key].parameters.append(parameter)
        found[key].states.append(state)
    return list(found.values())


def step_units(units: list[_Unit], parameters: Iterable[Tensor]) -> bool:
    """Steps all of them; or none, and returns False, where a gradient or its square is not finite.

    parameters: all that the optimizer has; of those that are sharded, all processes agree.
    The gradients are looked at first, all of them, which gives each moment its scale as well: that
    of the largest that it can become.
    """
    largest = [_largest(unit.gradient()) for unit in units]
    finite = all(x < LARGEST for x in _on_cpu(largest))
    if not everywhere(finite, parameters):
        return False
    batches: dict[Any, list[int]] = {}
    for number, unit in enumerate(units):
        for state in unit.states:
            state["step"] += 1
        key = (id(unit.group), unit.parameters[0].device, *unit.encodings.values())
        batches.setdefault(key, []).append(number)
    for numbers in batches.values():
        batch = [units[number] for number in numbers]
        scales = _scales(batch, torch.stack([largest[number] for number in numbers]))
        for unit, new in zip(batch, scales, strict=True):
            _step(unit, new)
    return True


def _on_cpu(numbers: list[Tensor]) -> list[float]:
    """0-dim tensors as numbers: the one time that the host waits for a GPU."""
    return torch.stack([x.cpu() for x in numbers]).tolist() if numbers else []


def _largest(x: Tensor) -> Tensor:
    """The largest magnitude, 0-dim float32; NaN where there is one, 0 of an empty shard."""
    if not x.numel():
        return x.new_zeros((), dtype=torch.float32)
    low, high = torch.aminmax(x)
    return torch.maximum(-low, high).to(torch.float32)


Scales = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Of the weight and the moments, 0-dim, where one is for a whole tensor."""


def _scales(units: list[_Unit], largest: Tensor) -> list[Scales]:
    """New scales for units of one group and of the same encodings; largest: of their gradients.

    A moment has no magnitude beyond the same moment of the largest magnitudes, which is kept for it
    as ``amax``: one pass over the gradient is all that a scale costs.
    """
    b1, b2 = units[0].group["betas"]
    found: dict[str, list[Tensor | None]] = {}
    for name, encoding in units[0].encodings.items():
        kept = [read(unit.states[0], name).amax for unit in units if encoding.scale == "tensor"]
        amaxes = [amax for amax in kept if amax is not None]
        if not amaxes:
            found[name] = [None] * len(units)
            continue
        amax = torch.stack(amaxes)
        if name == MASTER:
            amax = HEADROOM * amax
        elif name == FIRST:
            amax = b1 * amax + (1 - b1) * largest
        else:
            amax = b2 * amax + (1 - b2) * largest.square()
        if name != MASTER:
            for old, new in zip(amaxes, amax.unbind(), strict=True):
                old.copy_(new)
        found[name] = scales_for(amax, encoding)
    return [*zip(found[MASTER], found[FIRST], found[SECOND], strict=True)]


Kept = tuple[Stored, Stored, Stored]
"""The weight and the moments."""


def _step(unit: _Unit, scales: Scales) -> None:
    """One unit, all of it or in pieces that stay in a processor's cache."""
    grad, numbers = unit.gradient(), unit.numbers()
    kept = (unit.weight(), unit.kept(FIRST), unit.kept(SECOND))
    how, compiled = unit.how, unit.group["compile"] and len(unit.states) == 1
    keys = unit.keys() if any(how.stochastic) else []
    if compiled:
        keys = [torch.tensor(key, device=grad.device) for key in keys]
    largest = []
    for begin, end in _pieces(grad, compiled):
        parts = (kept[0].part(begin, end), kept[1].part(begin, end), kept[2].part(begin, end))
        step = _in_float32 if compiled and (end - begin) % BLOCK == 0 else _adam
        largest.append(step(parts, grad[begin:end], numbers, how, scales, keys, begin))
    if kept[0].amax is not None:
        kept[0].amax.copy_(torch.stack(largest).amax())
    for stored, scale in zip(kept, scales, strict=True):
        if stored.scale is not None and scale is not None:
            stored.scale.copy_(scale)
    unit.finish(*kept)


def _pieces(x: Tensor, compiled: bool) -> Iterator[tuple[int, int]]:
    """Where a flat tensor is cut: into what stays in a processor's cache, or for what is compiled
    into pieces whose results need no fresh memory, and a rest that is no whole number of blocks."""
    count, size = len(x), len(x)
    if x.is_cpu:
        size = COMPILED if compiled else CHUNK * torch.get_num_threads()
    whole = count - count % BLOCK if compiled else count
    for begin in range(0, whole, size):
        yield begin, min(begin + size, whole)
    if whole < count:
        yield whole, count


def _in_float32(kept: Kept, grad: Tensor, *rest: Any) -> Tensor:
    """`_adam`, compiled. On a CPU what has 16 bits is widened before and narrowed after it: loops
    that torch compiles for AVX-512 read and write 16-bit numbers under masks, which takes twice the
    time (such loads are not prefetched, and such stores are waited for by the next)."""
    if not grad.is_cpu:
        return _compiled()(kept, grad, *rest)
    weight, first, second = (stored.widened() for stored in kept)
    largest = _compiled()((weight, first, second), grad.to(torch.float32), *rest)
    for stored, new in zip(kept, (weight, first, second), strict=True):
        if new is not stored:
            stored.values.copy_(new.values)
    return largest


def _adam(
    kept: Kept,
    grad: Tensor,
    numbers: Tensor,
    how: _How,
    scales: Scales,
    keys: list[Key],
    begin: int,
) -> Tensor:
    """Adam (Kingma and Ba, arXiv:1412.6980, algorithm 1) with decoupled decay, in place.

        m = b1 m + (1 - b1) g,  v = b2 v + (1 - b2) g^2
        w = decay w - size m / (root sqrt(v) + eps)

    In float32, from the new moments before they are rounded. grad: (n,), the elements from
    ``begin``. numbers: see `_Unit.numbers`. Returns the largest magnitude of a weight that has a
    scale, else 0.
    """
    weight, first, second = kept
    decay, b1, c1, b2, c2, size, root, eps = numbers.unbind()
    g = grad.to(torch.float32)
    m = decode(first) * b1 + g * c1
    v = decode(second) * b2 + g * g * c2
    w = decode(weight) * decay - m * size / (v.sqrt() * root + eps)
    bits = low = high = None
    of_weight, of_first, of_second = how.stochastic
    if of_first or of_second:
        word = bits_from_key(g.shape, keys[0], device=g.device, start=begin)
        high = fewer_bits(word, HALF) if of_first else None
        low = fewer_bits(word << 16, HALF) if of_second else None
    if of_weight:
        bits = bits_from_key(g.shape, keys[1], device=g.device, start=begin)
    write(w, weight, how.weight, scales[0], bits=bits)
    write(m, first, how.first, scales[1], bits=high)
    write(v, second, how.second, scales[2], away=True, bits=low)
    return w.abs().amax() if how.weight.scale == "tensor" else w.new_zeros(())


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(_adam)
