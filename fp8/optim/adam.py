"""`Adam` and `AdamW` with states in 8 or 16 bits.

    optimizer = fp8.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)

The states are plain tensors in ``optimizer.state``. One kept as it is has the name that torch gives
it (``exp_avg``, ``exp_avg_sq``); one in units of a scale is ``exp_avg_values`` with
``exp_avg_scale`` (0-dim, or one for each block of 128) and, where that is one for all,
``exp_avg_amax``. A master weight is ``master`` in the same way.

_How long a step can be. With |g| up to any size at any time, the moments of exact Adam give

    |m| / sqrt(v) <= (1 - b1) / sqrt((1 - b2) (1 - b1^2 / b2)),

by the inequality of Cauchy and Schwarz: 7.3 for the default betas. Rounded to nearest, a moment
that is stored has a relative error of up to u = 2**-(mantissa bits + 1), and rounding of small ones
goes the safe way (see `fp8.optim.encodings`), so that the same holds with b1 (1 + u) and b2 (1 - u)
under the inner fraction: 10.9 with "e4m3" and "float16", 1.5 times as much. (A second moment below
the smallest normal value is only ever too large.) Rounded stochastically, as `fp8.optim.encodings`
says when, moments are right in the mean instead: first ones are not larger, second ones not
smaller.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from ..common.validation import check_flag, check_name, check_number
from ..formats.format import dtype_name
from ..formats.quantize import CHUNK
from ..formats.random_bits import Key, bits_from_key, fewer_bits, key_at, random_key
from .base import LowPrecision, refuse
from .encodings import (
    BLOCK,
    ENCODINGS,
    HEADROOM,
    MASTERS,
    MOMENTS,
    Encoding,
    Stored,
    decode,
    scale_for,
    write,
)
from .sgd import MOMENTUM
from .state import (
    FIRST,
    MASTER,
    PARTS,
    SECOND,
    Group,
    State,
    convert,
    everywhere,
    is_plain,
    local,
    parameters_of,
    prepare,
    read,
)

__all__ = ["Adam", "AdamW", "state_bytes"]

HALF = 15
"""Random bits for each of the two moments, from one word of 32."""


class _How(NamedTuple):
    """_How the weight and the moments are kept, and which of them are rounded stochastically."""

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


class _Room(threading.local):
    """The memory of the copies in float32, at most `fp8.optim.adam.COMPILED` numbers. It stays with
    the thread: memory that is new at each step costs as much as half of the step."""

    numbers = torch.empty(0, device="cpu")

    def of(self, rows: int, columns: int) -> Tensor:
        if torch.compiler.is_compiling():  # which is not to depend on what this thread has done
            return torch.empty(rows, columns)
        if len(self.numbers) < rows * columns:
            self.numbers = torch.empty(rows * columns, dtype=torch.float32, device="cpu")
        return self.numbers[: rows * columns].view(rows, columns)


ROOM = _Room()


def _adam_compiled(
    kept: Kept, old: list[Tensor], room: Tensor, numbers: Tensor, how: _How, keys: list[Key]
) -> Tensor:
    """`_adam`, compiled. On a CPU it reads what has 16 bits from a copy in ``room``: loops that
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


def _adam(
    kept: Kept, old: Sequence[Tensor], numbers: Tensor, how: _How, keys: Sequence[Key]
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
    return torch.compile(_adam, dynamic=dynamic, options={"guard_filter_fn": skip})


LARGEST = torch.finfo(torch.float32).max ** 0.5
"""A gradient beyond this has no square in float32."""

PLAIN = {
    torch.float32: ENCODINGS["float32"],
    torch.bfloat16: ENCODINGS["bfloat16"],
    torch.float16: Encoding(
        name="float16", dtype=torch.float16, format=ENCODINGS["float16"].format
    ),
}
"""_How weights without a master are kept, by their dtype."""

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
    how: _How

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
        formulas = (decay, b1, 1 - b1, b2, 1 - b2, size, root, group["eps"])
        return torch.tensor([*formulas, *(1.0 if x is None else 1 / x for x in scales)])

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


def _units_of(group: Group, states: dict[Any, State], index: int, decoupled: bool) -> list[_Unit]:
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


def _how(parameter: Tensor, kept: dict[str, Encoding], group: Group) -> _How:
    here, (b1, b2) = local(parameter), group["betas"]
    weight = kept.get(MASTER) or PLAIN[here.dtype if is_plain(here) else torch.float32]
    first, second = kept[FIRST], kept[SECOND]
    stochastic = (
        group["stochastic_weights"] and weight.dtype != torch.float32,
        first.rounds_stochastically(b1),
        second.rounds_stochastically(b2),
    )
    return _How(weight, first, second, stochastic)


def _step_units(units: list[_Unit], parameters: Iterable[Tensor]) -> bool:
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
            largest.append(_adam_compiled(parts, old, room, *rest))
        else:
            largest.append(_adam(parts, old, *rest))
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


def _check(group: dict[str, Any]) -> None:
    """Raises ValueError and TypeError for what a group cannot have."""
    choices: dict[str, tuple[str | None, ...]] = {**MOMENTS, "master_weights": (None, *MASTERS)}
    for name, allowed in choices.items():
        check_name(name, group[name], allowed)
    check_flag("stochastic_weights", group["stochastic_weights"])
    for field in ("lr", "eps", "weight_decay", "min_size"):
        check_number(field, group[field])
        if not 0 <= group[field] < math.inf:
            raise ValueError(f"{field} must be finite and not negative, got {group[field]}")
    betas = group["betas"]
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise TypeError(f"betas are two numbers, got {betas!r}")
    for i, beta in enumerate(betas):
        check_number(f"betas[{i}]", beta)
    if not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas must be at least 0 and less than 1, got {betas}")
    if not isinstance(group["seed"], int):
        raise TypeError(f"seed is an int, got {group['seed']!r}")
    for parameter in group["params"]:
        if parameter.dtype not in PLAIN:
            listed = ", ".join(map(dtype_name, PLAIN))
            raise TypeError(f"cannot step a parameter of {parameter.dtype}; allowed are {listed}")


class _Adam(LowPrecision):
    """What `Adam` and `AdamW` share. Neither is a subclass of the other, so that no test for one of
    them takes the other for it."""

    options = (
        "first_moment",
        "second_moment",
        "master_weights",
        "stochastic_weights",
        "min_size",
        "compile",
    )
    check = staticmethod(_check)
    converted = staticmethod(convert)

    decoupled: bool
    default_decay: float

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float | None = None,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        first_moment: str = "e4m3",
        second_moment: str = "float16",
        master_weights: str | None = None,
        stochastic_weights: bool = False,
        min_size: int = 4096,
        seed: int = 0,
        compile: bool = False,
    ) -> None:
        refuse(amsgrad=amsgrad, foreach=foreach, fused=fused)
        refuse(capturable=capturable, differentiable=differentiable)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": self.default_decay if weight_decay is None else weight_decay,
            "maximize": maximize,
            "first_moment": first_moment,
            "second_moment": second_moment,
            "master_weights": master_weights,
            "stochastic_weights": stochastic_weights,
            "min_size": min_size,
            "seed": seed,
            "compile": compile,
            "skipped_steps": 0,
        }
        super().__init__(params, defaults)

    def step_all(self) -> bool:
        index, units = 0, []
        for group in self.param_groups:
            units += _units_of(group, self.state, index, self.decoupled)
            index += len(group["params"])
        return _step_units(units, parameters_of(self))


class Adam(_Adam):
    """`torch.optim.Adam`: weight_decay is added to the gradient (L2). Arguments as in `AdamW`."""

    decoupled = False
    default_decay = 0.0


class AdamW(_Adam):
    """`torch.optim.AdamW`, decay decoupled from the gradient, with states in low precision.

    Positions, names and defaults of torch's arguments are torch's. The arithmetic is float32.

    params: parameters, named parameters or groups of them; float32, bfloat16 or float16, or tensors
    of another class that stand for these (`fp8.tensors.scaled_tensor.ScaledTensor`).
    first_moment, second_moment: names in `MOMENTS`, of `ENCODINGS`. Bytes an element: "float32" 4;
    "bfloat16" 2; "float16" 2, in units of one scale for the tensor; "e4m3" 1, so too; "e4m3_block"
    and "e5m3_block" 1.03, with a scale for each block of 128.
    master_weights: "float32" or "float16" (in units of one scale): the copy that is stepped of
    weights that are not float32 themselves; after a step they are rounded from it.
    stochastic_weights: round weights, or masters, that are bfloat16 or float16 to one of their two
    neighbours, so that steps too small for their precision are taken in the mean.
    min_size: parameters of fewer elements keep float32 moments, and are stepped together.
    seed: of the random bits, which follow from it, the step and the position of an element: the
    same eager and compiled, and in a run continued from a state_dict.
    compile: compile the step of large parameters with `torch.compile`. Otherwise it goes through
    them piece by piece in a processor's cache.

    All may differ between groups, as the learning rate may. A gradient that is not finite, or
    whose square is not, in any of the groups: no parameter is stepped and no state changes, and
    ``skipped_steps`` counts it. One look at all gradients finds out; on a GPU the host waits for
    it.

    Raises ValueError for values out of range and where amsgrad, foreach, fused, capturable or
    differentiable is True, TypeError for another dtype.

    >>> weight = torch.nn.Parameter(torch.ones(128, 128))
    >>> optimizer = AdamW([weight], lr=0.1, first_moment="e4m3_block", second_moment="e5m3_block")
    >>> weight.square().sum().backward()
    >>> _ = optimizer.step()
    >>> optimizer.state[weight]["exp_avg_values"].dtype
    torch.float8_e4m3fn
    >>> state_bytes(optimizer)
    {'first_moment': 16896, 'second_moment': 16896, 'master': 0, 'step': 4}
    """

    decoupled = True
    default_decay = 1e-2


def state_bytes(optimizer: Optimizer) -> dict[str, int]:
    """Bytes of the tensors that an optimizer of this module keeps, by what they are for."""
    kinds = {SECOND: "second_moment", FIRST: "first_moment", MASTER: "master", "step": "step"}
    kinds[MOMENTUM] = "first_moment"
    found = dict.fromkeys(("first_moment", "second_moment", "master", "step"), 0)
    for state in optimizer.state.values():
        for key, value in state.items():
            kind = next(kind for name, kind in kinds.items() if key.startswith(name))
            found[kind] += local(value).nbytes
    return found
