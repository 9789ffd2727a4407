"""One step of Adam over the parameters of an optimizer: what is stepped together, in which pieces,
with which scales. The arithmetic is that of `fp8.adam_step`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .adam_step import ROOM, How, adam, adam_compiled
from .moments import BLOCK, ENCODINGS, HEADROOM, Encoding, Stored, decode, scale_for
from .optim_state import (
    FIRST,
    MASTER,
    PARTS,
    SECOND,
    Group,
    State,
    everywhere,
    is_plain,
    local,
    prepare,
    read,
)
from .quantize import CHUNK
from .random_bits import Key, key_at, random_key

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

COMPILED = 1 << 22
"""Numbers that a compiled step copies to float32 at once on a CPU: 16 MiB."""

BLOCKS = 1 << 16
"""Numbers that a compiled step with blocks takes at once on each thread of a CPU, always as many:
for a number that may change torch compiles loops without vectors, which take ten times as long."""

Scales = list[float | None]
"""Of the weight and the moments, where one is for a whole tensor."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Unit:
    """What is stepped together: one parameter, or small ones of a group as one tensor.

    index: of the first, among all parameters of the optimizer, for random bits of its own.
    master: whether there are master weights, which are what is stepped.
    """

    parameters: list[Tensor]
    states: list[State]
    group: Group
    decoupled: bool
    index: int
    master: bool
    how: How

    def kept(self, name: str) -> Stored:
        """A moment or the master, flat; of one parameter it shares memory with the state."""
        if len(self.states) == 1:
            return read(self.states[0], name)
        return Stored(torch.cat([read(state, name).values for state in self.states]))

    def weight(self) -> Stored:
        """What is stepped: masters, the weight itself, or a copy of the weights."""
        if self.master:
            return self.kept(MASTER)
        here = [local(parameter.detach()) for parameter in self.parameters]
        if len(here) == 1 and is_plain(here[0]):
            return Stored(here[0].view(-1))
        return Stored(torch.cat([x.to(self.how.weight.dtype).reshape(-1) for x in here]))

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

    def amaxes(self) -> list[Tensor | None]:
        """Of the weight and the moments, where one scale is for the whole tensor."""
        state = self.states[0]
        return [
            state[name + PARTS[2]] if encoding.scale == "tensor" else None
            for name, encoding in self.how.by_name
        ]

    def scales(self, largest: float, amaxes: Iterator[float]) -> Scales:
        """New ones, for gradients of up to ``largest``; ``amaxes``: the values of `amaxes`.

        A moment has no magnitude beyond the same moment of the largest magnitudes, which is kept
        for it as ``amax``: one pass over the gradient is all that a scale costs.
        """
        b1, b2 = self.group["betas"]
        found: Scales = []
        for kept, (name, encoding) in zip(self.amaxes(), self.how.by_name, strict=True):
            if kept is None:
                found.append(None)
                continue
            amax = next(amaxes)
            if name == MASTER:
                amax *= HEADROOM
            else:
                beta, x = (b1, largest) if name == FIRST else (b2, largest**2)
                amax = beta * amax + (1 - beta) * x
                kept.fill_(amax)
            found.append(scale_for(amax, encoding))
        return found

    def numbers(self, scales: Scales) -> Tensor:
        """The scalars of a step, (11,), each computed in float64 and rounded once; 1 / scales."""
        group = self.group
        step, (b1, b2), lr = float(self.states[0]["step"]), group["betas"], float(group["lr"])
        decay = 1 - lr * group["weight_decay"] if self.decoupled else 1.0
        size, root = lr / (1 - b1**step), (1 - b2**step) ** -0.5
        adam = (decay, b1, 1 - b1, b2, 1 - b2, size, root, group["eps"])
        return torch.tensor([*adam, *(1.0 if x is None else 1 / x for x in scales)])

    @property
    def compiled(self) -> bool:
        """Whether torch compiles the step."""
        return self.group["compile"] and len(self.states) == 1

    def keys(self) -> list[Key]:
        """Of the random bits of this step: for the moments, and for the weight."""
        seed = (self.group["seed"], int(self.states[0]["step"]), self.index)
        return [random_key((*seed, stream)) for stream in range(2)]

    def finish(self, weight: Stored, first: Stored, second: Stored) -> None:
        """Writes what was stepped to where it comes from."""
        joined = len(self.states) > 1
        if joined:
            kept = {FIRST: first, SECOND: second, **({MASTER: weight} if self.master else {})}
            for name, stored in kept.items():
                _split(stored.values, [read(state, name).values for state in self.states])
        here = [local(parameter.detach()) for parameter in self.parameters]
        if joined or self.master or not is_plain(here[0]):
            _split(decode(weight) if self.master else weight.values, here)


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
        kept = prepare(state, parameter, group)
        key: Any = number
        if parameter.numel() < group["min_size"]:
            plain = is_plain(local(parameter)) and parameter.dtype
            key = (float(state["step"]), parameter.device, plain, MASTER in kept)
        if key not in found:
            found[key] = _Unit(
                parameters=[],
                states=[],
                group=group,
                decoupled=decoupled,
                index=number,
                master=MASTER in kept,
                how=_how(parameter, kept, group),
            )
        found[key].parameters.append(parameter)
        found[key].states.append(state)
    return list(found.values())


def _how(parameter: Tensor, kept: dict[str, Encoding], group: Group) -> How:
    here, (b1, b2) = local(parameter), group["betas"]
    weight = kept.get(MASTER) or PLAIN[here.dtype if is_plain(here) else torch.float32]
    first, second = kept[FIRST], kept[SECOND]
    stochastic = (
        group["stochastic_weights"] and weight.dtype != torch.float32,
        first.rounds_stochastically(b1),
        second.rounds_stochastically(b2),
    )
    return How(weight, first, second, stochastic)


def step_units(units: list[_Unit], parameters: Iterable[Tensor]) -> bool:
    """Steps all of them; or none, and returns False, where a gradient or its square is not finite.

    parameters: all that the optimizer has; of those that are sharded, all processes agree.
    The gradients are looked at first, all of them, which gives each moment its scale as well: that
    of the largest that it can become.
    """
    looks = [x for unit in units for x in _extremes(unit.gradient())]
    looks += [amax for unit in units for amax in unit.amaxes() if amax is not None]
    numbers = iter(_on_cpu(looks))
    largest = [max(-next(numbers), next(numbers)) for _ in units]  # NaN where there is one
    if not everywhere(all(x < LARGEST for x in largest), parameters):
        return False
    for unit, x in zip(units, largest, strict=True):
        for state in unit.states:
            state["step"] += 1
        _step(unit, unit.scales(x, numbers))
    return True


def _on_cpu(numbers: list[Tensor]) -> list[float]:
    """0-dim tensors as numbers: the one time that the host waits for a GPU."""
    devices = {x.device for x in numbers}
    if len(devices) == 1 and not numbers[0].is_cpu:
        return torch.stack([x.to(torch.float32) for x in numbers]).tolist()
    return [x.item() for x in numbers]


def _extremes(x: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest and the largest number, 0-dim; NaN where there is one, 0 of an empty shard."""
    low, high = torch.aminmax(x if x.numel() else x.new_zeros(1))
    return low, high


def _step(unit: _Unit, scales: Scales) -> None:
    """One unit, in pieces that stay in a processor's cache; the rest of a compiled one is not
    compiled."""
    kept = (unit.weight(), unit.kept(FIRST), unit.kept(SECOND))
    grad, numbers, how = unit.gradient(), unit.numbers(scales), unit.how
    count = len(grad)
    keys = unit.keys() if any(how.stochastic) else []
    size, least, narrow = _sizes((grad, *(stored.values for stored in kept)), unit)
    room = ROOM.of(narrow, min(size, count))
    whole = count - count % least
    largest = []
    for begin, end in itertools.pairwise([*range(0, whole, size), whole, count]):
        if begin == end:
            continue
        parts = kept
        if end - begin < count:
            parts = (kept[0].part(begin, end), kept[1].part(begin, end), kept[2].part(begin, end))
        old = [parts[0].values, parts[1].values, parts[2].values, grad[begin:end]]
        rest = (numbers, how, [key_at(key, begin) for key in keys])
        if unit.compiled and begin < whole:
            largest.append(adam_compiled(parts, old, room, *rest))
        else:
            largest.append(adam(parts, old, *rest))
    if kept[0].amax is not None and largest:
        kept[0].amax.copy_(torch.stack(largest).amax())
    for stored, scale in zip(kept, scales, strict=True):
        if stored.scale is not None and scale is not None:
            stored.scale.fill_(scale)
    unit.finish(*kept)


def _sizes(read: Sequence[Tensor], unit: _Unit) -> tuple[int, int, int]:
    """Of the pieces: how many numbers, a power of two, or all; what all but the rest are multiples
    of; and how many tensors have 16 bits and are copied to float32."""
    least, threads = BLOCK if unit.compiled else 1, (torch.get_num_threads() - 1).bit_length()
    if not read[0].is_cpu:
        return max(len(read[0]), 1), least, 0
    if not unit.compiled:
        return CHUNK << threads, least, 0
    narrow = [x.element_size() for x in read].count(2)
    if unit.how.in_blocks:
        return BLOCKS << threads, BLOCKS << threads, narrow
    return COMPILED >> max(narrow - 1, 0).bit_length(), least, narrow
