"""One step of Adam: the arithmetic, eager or compiled, and the parameters that take it together."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.adam import adam

from ..casts.scaled_tensor import store
from ..common.dtensor import part_of
from ..formats.quantize import CHUNK
from ..formats.random_bits import Key, bits_from_key, fewer_bits, key_at, random_key
from ..recipes.scaling import scale_of_number
from . import encodings
from . import state as states
from .encodings import BLOCK, WEIGHTS, Encoded, Encoding, decode
from .state import (
    FIRST,
    MASTER,
    PARTS,
    SECOND,
    Group,
    State,
    has,
    in_dtype,
    is_plain,
    read,
)

Scales = list[float | None]
"""The scales of the weight and the moments, as in `STORED`; None for one without."""

# Random bits for each of the two moments, from one 32-bit word.
HALF = 15


class _How(NamedTuple):
    """The encodings of the weight and the moments, and which of them are rounded stochastically."""

    weight: Encoding
    first: Encoding
    second: Encoding
    stochastic: tuple[bool, bool, bool]


STORED = (MASTER, FIRST, SECOND)
"""The names in a state, in the order of the fields of `_How` and `_Tensors`."""


class _Tensors(NamedTuple):
    """The weight and the two moments, as they are stored."""

    weight: Encoded
    first: Encoded
    second: Encoded

    def part(
        self,
        start: int,
        stop: int,
    ) -> _Tensors:
        """Views of the elements from ``start`` to ``stop``. See `Encoded.part`."""
        return _Tensors(*(x.part(start, stop) for x in self))


def _adam(
    tensors: _Tensors,
    grad: Tensor,
    numbers: Tensor,
    how: _How,
    keys: Sequence[Key],
) -> Tensor:
    """Adam (Kingma and Ba, arXiv:1412.6980, algorithm 1) with decoupled decay; updates ``tensors``
    in place.

        m = b1 m + (1 - b1) g,  v = b2 v + (1 - b2) g^2
        w = decay w - size m / (root sqrt(v) + eps)

    Computed in float32, from the new moments before they are rounded. numbers: as `Unit.numbers`
    returns them. Returns the largest magnitude of a weight that has a scale, else 0.
    """
    decay, b1, c1, b2, c2, size, root, eps, *units = numbers.unbind()
    g = grad.to(torch.float32)
    m = decode(tensors.first) * b1 + g * c1
    v = decode(tensors.second) * b2 + g * g * c2
    w = decode(tensors.weight) * decay - m * size / (v.sqrt() * root + eps)
    bits = None
    low = None
    high = None
    of_weight, of_first, of_second = how.stochastic
    if of_first or of_second:
        word = bits_from_key(g.shape, keys[0], device=g.device)
        if of_first:
            high = fewer_bits(word, HALF)
        if of_second:
            low = fewer_bits(word << 16, HALF)
    if of_weight:
        bits = bits_from_key(g.shape, keys[1], device=g.device)
    encodings.write(w, tensors.weight, how.weight, units[0], bits=bits)
    encodings.write(m, tensors.first, how.first, units[1], bits=high)
    encodings.write(v, tensors.second, how.second, units[2], away=True, bits=low)
    if how.weight.scale == "tensor":
        return w.abs().amax()
    return w.new_zeros(())


@functools.cache
def _compiled(dynamic: bool | None) -> Callable[..., Tensor]:
    # Guards on globals cost time, and no function of this package changes.
    skip = torch.compiler.skip_guard_on_globals_unsafe
    warnings.filterwarnings("ignore", "bf16 and fp16 are mixed")  # inductor
    return torch.compile(_adam, dynamic=dynamic, options={"guard_filter_fn": skip})


# Larger magnitudes in a gradient count as this one: a second moment is then at most 2**126, which
# float32 holds, and the bound on the size of a step still holds.
LARGEST = 2.0**63

# Elements that a compiled step with blocks processes at once per CPU thread: constant, because for
# dynamic sizes torch compiles loops without vectors, which are ten times slower.
BLOCKS = 1 << 16


@dataclass(frozen=True, eq=False)
class Unit:
    """Parameters updated together: one, or the small ones of a group, concatenated. index:
    the index of the first among all of the optimizer, which makes random bits distinct."""

    group: Group
    decoupled: bool
    index: int
    how: _How
    parameters: list[Tensor] = field(default_factory=list)
    states: list[State] = field(default_factory=list)

    @property
    def master(self) -> bool:
        return has(self.states[0], MASTER)

    def here(self) -> list[Tensor]:
        return [part_of(parameter.detach()) for parameter in self.parameters]

    def stored(self, name: str) -> Encoded:
        """A moment or the master, flat; for a single parameter it shares memory with the state."""
        if len(self.states) == 1:
            return read(self.states[0], name)
        return Encoded(torch.cat([read(state, name).values for state in self.states]))

    def weight(self) -> Encoded:
        """The tensor to update: the masters, the weight itself, or a copy of the weights."""
        if self.master:
            return self.stored(MASTER)
        here = self.here()
        if len(here) == 1 and is_plain(here[0]):
            return Encoded(here[0].view(-1))
        dtype = self.how.weight.dtype
        return Encoded(torch.cat([x.to(dtype).reshape(-1) for x in here]))

    def gradient(self) -> Tensor:
        """The gradient that Adam uses, flat: negated for maximize, with the L2 decay added."""
        flats = []
        for parameter in self.parameters:
            flat = part_of(parameter.grad.detach())  # type: ignore[union-attr]
            if not is_plain(flat):
                flat = flat.to(torch.float32)
            flats.append(flat.reshape(-1))
        grad = flats[0]
        decay = self.group["weight_decay"]
        if len(flats) > 1:
            grad = torch.cat(flats)
        if self.group["maximize"]:
            grad = -grad
        if decay and not self.decoupled:
            grad = grad.to(torch.float32) + decay * decode(self.weight())
        return grad

    def amaxes(self) -> dict[int, Tensor]:
        """The amax of each of `STORED` that has one, by its place there."""
        state = self.states[0]
        entries = {i: name + PARTS[2] for i, name in enumerate(STORED)}
        return {i: state[name] for i, name in entries.items() if name in state}

    def scales(
        self,
        largest: float,
        numbers: Iterator[float],
    ) -> Scales:
        """New scale factors for gradients up to ``largest``, whose moment bounds a moment. numbers:
        the values of `amaxes`."""
        scales: Scales = [None, None, None]
        for i, amax in self.amaxes().items():
            new = next(numbers)
            if STORED[i] == MASTER:
                new *= encodings.HEADROOM
            else:
                beta = self.group["betas"][i - 1]
                new = beta * new + (1 - beta) * largest**i
                amax.fill_(new)
            scales[i] = scale_of_number(new, self.how[:3][i].format)
        return scales

    def numbers(self, scales: Scales) -> Tensor:
        """The 8 scalars of a step, computed in float64 and rounded once, then 1 / scales."""
        group, (b1, b2) = self.group, self.group["betas"]
        step = float(self.states[0]["step"])
        lr = float(group["lr"])
        decay = 1.0
        if self.decoupled:
            decay = 1 - lr * group["weight_decay"]
        size = lr / (1 - b1**step)
        root = (1 - b2**step) ** -0.5
        formulas = [decay, b1, 1 - b1, b2, 1 - b2, size, root, group["eps"]]
        return torch.tensor(formulas + [1 / (x or 1.0) for x in scales])

    def seed(self, stream: int) -> tuple[int, ...]:
        """stream: 0 for the moments, 1 for the weight, from 2 on for copies of weights."""
        return self.group["seed"], int(self.states[0]["step"]), self.index, stream

    def rounds_copies(self) -> bool:
        """Whether float32 copies of weights of a tensor subclass are rounded stochastically."""
        if self.master or not self.group["stochastic_weights"]:
            return False
        here = part_of(self.parameters[0])
        return not in_dtype(here) and states.format_of(here).mantissa_bits < 23

    def finish(
        self,
        weight: Encoded,
        first: Encoded,
        second: Encoded,
    ) -> None:
        """Writes what does not share memory with a parameter or a state."""
        here = self.here()
        joined = len(here) > 1
        if joined or self.master or not is_plain(here[0]):
            values = weight.values
            random = self.rounds_copies()
            if self.master:
                values = decode(weight)
            for stream, (x, part) in enumerate(_parts(values, here), 2):
                if random:
                    seed = self.seed(stream)
                    part = states.rounded_stochastically(part, x, seed)
                store(x, part)
        if not joined:
            return
        for name, stored in zip(STORED, (weight, first, second), strict=True):
            if name != MASTER or self.master:
                each = [read(state, name).values for state in self.states]
                for x, part in _parts(stored.values, each):
                    x.copy_(part)


def _parts(flat: Tensor, of: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    for x, part in zip(of, flat.split([x.numel() for x in of]), strict=True):
        yield x, part.view(x.shape)


def step_as_torch(
    group: Group,
    decoupled: bool,
    parameters: list[Tensor],
    states: list[State],
) -> None:
    """Steps parameters of the dtypes in `WIDE`, and their states, as `torch.optim.Adam` does."""
    if not parameters:
        return
    b1, b2 = group["betas"]
    adam(
        [part_of(parameter.detach()) for parameter in parameters],
        [part_of(parameter.grad.detach()) for parameter in parameters],  # type: ignore[union-attr]
        [state[FIRST] for state in states],
        [state[SECOND] for state in states],
        [],  # max_exp_avg_sqs, of amsgrad
        [state["step"] for state in states],
        has_complex=any(map(torch.is_complex, parameters)),
        decoupled_weight_decay=decoupled,
        amsgrad=False,
        beta1=b1,
        beta2=b2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
    )


def how_of(
    parameter: Tensor,
    stored_as: dict[str, Encoding],
    group: Group,
) -> _How:
    """How a step stores the results for a parameter. stored_as: as in `fp8.optim.state.prepare`."""
    here, (b1, b2) = part_of(parameter), group["betas"]
    weight = WEIGHTS[torch.float32]  # of a tensor subclass, which rounds by itself
    if in_dtype(here):
        weight = WEIGHTS[here.dtype]
    weight = stored_as.get(MASTER, weight)
    first = stored_as[FIRST]
    second = stored_as[SECOND]
    stochastic = (
        group["stochastic_weights"] and weight.dtype != torch.float32,
        first.rounds_stochastically(b1),
        second.rounds_stochastically(b2),
    )
    return _How(weight, first, second, stochastic)


def update(
    unit: Unit,
    largest_grad: float,
    scales: Scales,
) -> None:
    """Updates one unit in chunks. The remainder of a compiled unit runs in eager mode."""
    tensors = _Tensors(unit.weight(), unit.stored(FIRST), unit.stored(SECOND))
    grad = unit.gradient()
    numbers = unit.numbers(scales)
    how = unit.how
    if largest_grad > LARGEST:
        grad = grad.to(torch.float32).clamp(-LARGEST, LARGEST)
    count = len(grad)
    keys = []
    dynamic = None
    if any(how.stochastic):
        keys = [random_key(unit.seed(stream)) for stream in range(2)]
    compiled = unit.group["compile"] and len(unit.states) == 1
    threads = (torch.get_num_threads() - 1).bit_length()
    size, least = max(count, 1), 1  # of chunks, and what divides them
    if compiled:
        least = BLOCK
        if grad.is_cpu and "block" in (how.first.scale, how.second.scale):
            size = least = BLOCKS << threads
            dynamic = False
    elif grad.is_cpu:
        size = CHUNK << threads  # which stay in a processor's cache
    whole = count - count % least
    largest = []
    for begin, end in itertools.pairwise([*range(0, whole, size), whole, count]):
        if begin == end:
            continue
        parts = tensors
        if end - begin < count:
            parts = tensors.part(begin, end)
        arguments = (parts, grad[begin:end], numbers, how)
        at = [key_at(key, begin) for key in keys]
        if compiled and begin < whole:
            # Python numbers would be constants of the graph, which would be compiled again.
            words = [torch.as_tensor(key, device=grad.device) for key in at]
            largest.append(_compiled(dynamic)(*arguments, words))
        else:
            largest.append(_adam(*arguments, at))
    if tensors.weight.amax is not None and largest:
        tensors.weight.amax.copy_(torch.stack(largest).amax())
    for stored, scale in zip(tensors, scales, strict=True):
        if stored.scale is not None and scale is not None:
            stored.scale.fill_(scale)
    unit.finish(*tensors)
