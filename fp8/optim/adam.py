"""`Adam` and `AdamW` with states in 8 or 16 bits.

A state without a scale has the name that torch uses (``exp_avg``, ``exp_avg_sq``). One with a scale
consists of ``exp_avg_values``, ``exp_avg_scale`` (0-dim, or one for each block of 128) and, with a
single scale, ``exp_avg_amax``. A master weight is stored as ``master`` in the same way.

Bound of a step. For gradients of any size, the moments of exact Adam satisfy

    |m| / sqrt(v) <= (1 - b1) / sqrt((1 - b2) (1 - b1^2 / b2)),

by the Cauchy-Schwarz inequality: 7.3 for the default betas. A moment rounded to nearest has a
relative error of at most u = 2**-(mantissa bits + 1), and small moments are rounded in the safe
direction (see `fp8.optim.encodings`). The same bound then holds with b1 (1 + u) and b2 (1 - u) in
the inner fraction: 10.9 with "e4m3" and "float16", 1.5 times as large. (A second moment below the
smallest normal value can only be too large.) Moments rounded stochastically are unbiased instead.
"""

from __future__ import annotations

import functools
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ..common.dtensor import part_of
from ..common.validation import check_flag, check_name, check_number
from ..formats.quantize import CHUNK
from ..formats.random_bits import Key, bits_from_key, fewer_bits, key_at, random_key
from ..recipes.scaling import scale_of_number
from ..tensors.scaled_tensor import store
from ..warnings import OptimizerWarning, warn_once
from . import encodings
from . import state as states
from .base import LowPrecision, check_group, refuse
from .encodings import BLOCK, MOMENTS, WEIGHTS, Encoded, Encoding, decode
from .state import FIRST, MASTER, PARTS, SECOND, Group, State, in_dtype, is_plain, read

HALF = 15
"""Random bits for each of the two moments, from one 32-bit word."""


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


def _adam(
    tensors: _Tensors, grad: Tensor, numbers: Tensor, how: _How, keys: Sequence[Key]
) -> Tensor:
    """Adam (Kingma and Ba, arXiv:1412.6980, algorithm 1) with decoupled decay; updates ``tensors``
    in place.

        m = b1 m + (1 - b1) g,  v = b2 v + (1 - b2) g^2
        w = decay w - size m / (root sqrt(v) + eps)

    Computed in float32, from the new moments before they are rounded. numbers: as `_Unit.numbers`
    returns them. Returns the largest magnitude of a weight that has a scale, else 0.
    """
    decay, b1, c1, b2, c2, size, root, eps, *units = numbers.unbind()
    g = grad.to(torch.float32)
    m = decode(tensors.first) * b1 + g * c1
    v = decode(tensors.second) * b2 + g * g * c2
    w = decode(tensors.weight) * decay - m * size / (v.sqrt() * root + eps)
    bits = low = high = None
    of_weight, of_first, of_second = how.stochastic
    if of_first or of_second:
        word = bits_from_key(g.shape, keys[0], device=g.device)
        high = fewer_bits(word, HALF) if of_first else None
        low = fewer_bits(word << 16, HALF) if of_second else None
    if of_weight:
        bits = bits_from_key(g.shape, keys[1], device=g.device)
    encodings.write(w, tensors.weight, how.weight, units[0], bits=bits)
    encodings.write(m, tensors.first, how.first, units[1], bits=high)
    encodings.write(v, tensors.second, how.second, units[2], away=True, bits=low)
    return w.abs().amax() if how.weight.scale == "tensor" else w.new_zeros(())


@functools.cache
def _compiled(dynamic: bool | None) -> Callable[..., Tensor]:
    skip = torch.compiler.skip_guard_on_globals_unsafe  # no function of this package changes
    warnings.filterwarnings("ignore", "bf16 and fp16 are mixed")  # inductor
    return torch.compile(_adam, dynamic=dynamic, options={"guard_filter_fn": skip})


LARGEST = 2.0**63
"""Larger magnitudes in a gradient count as this one: a second moment is then at most 2**126, which
float32 holds, and the bound of a step, which is that of any gradients, stays."""

BLOCKS = 1 << 16
"""Elements that a compiled step with blocks processes at once per CPU thread: constant, because for
dynamic sizes torch compiles loops without vectors, which are ten times slower."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Unit:
    """Parameters updated together: one, or the small ones of a group, concatenated. index: of the
    first among all of the optimizer, which makes random bits distinct."""

    group: Group
    decoupled: bool
    index: int
    how: _How
    master: bool
    parameters: list[Tensor] = field(default_factory=list)
    states: list[State] = field(default_factory=list)

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
        return Encoded(torch.cat([x.to(self.how.weight.dtype).reshape(-1) for x in here]))

    def gradient(self) -> Tensor:
        """The gradient that Adam uses, flat: negated for maximize, with the L2 decay added."""
        here = [part_of(parameter.grad.detach()) for parameter in self.parameters]  # type: ignore[union-attr]
        flats = [(x if is_plain(x) else x.to(torch.float32)).reshape(-1) for x in here]
        grad = flats[0] if len(flats) == 1 else torch.cat(flats)
        if self.group["maximize"]:
            grad = -grad
        if self.group["weight_decay"] and not self.decoupled:
            grad = grad.to(torch.float32) + self.group["weight_decay"] * decode(self.weight())
        return grad

    def amaxes(self) -> list[Tensor | None]:
        return [self.states[0].get(name + PARTS[2]) for name in STORED]

    def scales(self, largest: float, numbers: Iterator[float]) -> list[float | None]:
        """New scale factors for gradients up to ``largest``, whose moment bounds a moment."""
        scales: list[float | None] = [None, None, None]
        for i, amax in enumerate(self.amaxes()):
            if amax is None:
                continue
            new = next(numbers)
            if STORED[i] == MASTER:
                new *= encodings.HEADROOM
            else:
                beta = self.group["betas"][i - 1]
                new = beta * new + (1 - beta) * largest**i
                amax.fill_(new)
            scales[i] = scale_of_number(new, self.how[:3][i].format)
        return scales

    def numbers(self, scales: list[float | None]) -> Tensor:
        """The 8 scalars of a step, computed in float64 and rounded once, then 1 / scales."""
        group = self.group
        step, (b1, b2), lr = float(self.states[0]["step"]), group["betas"], float(group["lr"])
        decay = 1 - lr * group["weight_decay"] if self.decoupled else 1.0
        size, root = lr / (1 - b1**step), (1 - b2**step) ** -0.5
        formulas = (decay, b1, 1 - b1, b2, 1 - b2, size, root, group["eps"])
        return torch.tensor([*formulas, *(1.0 if x is None else 1 / x for x in scales)])

    def seed(self, stream: int) -> tuple[int, ...]:
        """stream: 0 for the moments, 1 for the weight, from 2 on for copies of weights."""
        return self.group["seed"], int(self.states[0]["step"]), self.index, stream

    def rounds_copies(self) -> bool:
        """Whether float32 copies of weights of a tensor subclass are rounded stochastically."""
        if self.master or not self.group["stochastic_weights"]:
            return False
        here = part_of(self.parameters[0])
        return not in_dtype(here) and states.format_of(here).mantissa_bits < 23

    def finish(self, weight: Encoded, first: Encoded, second: Encoded) -> None:
        here = self.here()
        joined = len(here) > 1
        if joined or self.master or not is_plain(here[0]):
            values, random = decode(weight) if self.master else weight.values, self.rounds_copies()
            for i, (x, part) in enumerate(_parts(values, here)):
                seed = self.seed(2 + i)
                store(x, states.rounded_stochastically(part, x, seed) if random else part)
        if joined:
            masters = {MASTER: weight} if self.master else {}
            for name, stored in (masters | {FIRST: first, SECOND: second}).items():
                each = [read(state, name).values for state in self.states]
                for x, part in _parts(stored.values, each):
                    x.copy_(part)


def _parts(flat: Tensor, of: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    for x, part in zip(of, flat.split([x.numel() for x in of]), strict=True):
        yield x, part.view(x.shape)


def _how(parameter: Tensor, stored_as: dict[str, Encoding], group: Group) -> _How:
    here, (b1, b2) = part_of(parameter), group["betas"]
    weight = stored_as.get(MASTER) or WEIGHTS[here.dtype if in_dtype(here) else torch.float32]
    first, second = stored_as[FIRST], stored_as[SECOND]
    stochastic = (
        group["stochastic_weights"] and weight.dtype != torch.float32,
        first.rounds_stochastically(b1),
        second.rounds_stochastically(b2),
    )
    return _How(weight, first, second, stochastic)


def _step(unit: _Unit, largest_grad: float, scales: list[float | None]) -> None:
    """Updates one unit in chunks. The remainder of a compiled unit runs in eager mode."""
    tensors = _Tensors(unit.weight(), unit.stored(FIRST), unit.stored(SECOND))
    grad, numbers, how = unit.gradient(), unit.numbers(scales), unit.how
    if largest_grad > LARGEST:
        grad = grad.to(torch.float32).clamp(-LARGEST, LARGEST)
    count = len(grad)
    keys = [random_key(unit.seed(i)) for i in range(2)] if any(how.stochastic) else []
    compiled = unit.group["compile"] and len(unit.states) == 1
    fixed = compiled and grad.is_cpu and "block" in (how.first.scale, how.second.scale)
    threads = (torch.get_num_threads() - 1).bit_length()
    size, least = max(count, 1), BLOCK if compiled else 1  # of chunks, and what divides them
    if fixed:
        size = least = BLOCKS << threads
    elif grad.is_cpu and not compiled:
        size = CHUNK << threads  # which stay in a processor's cache
    whole = count - count % least
    largest = []
    for begin, end in itertools.pairwise([*range(0, whole, size), whole, count]):
        if begin == end:
            continue
        parts = (
            tensors if end - begin == count else _Tensors(*(x.part(begin, end) for x in tensors))
        )
        arguments = (parts, grad[begin:end], numbers, how)
        at = [key_at(key, begin) for key in keys]
        if compiled and begin < whole:
            words = [torch.as_tensor(key, device=grad.device) for key in at]  # ints would recompile
            step = _compiled(False if fixed else None)
            largest.append(step(*arguments, words))
        else:
            largest.append(_adam(*arguments, at))
    if tensors.weight.amax is not None and largest:
        tensors.weight.amax.copy_(torch.stack(largest).amax())
    for stored, scale in zip(tensors, scales, strict=True):
        if stored.scale is not None and scale is not None:
            stored.scale.fill_(scale)
    unit.finish(*tensors)


class _Adam(LowPrecision):
    """Base class of `Adam` and `AdamW`, which isinstance tells apart."""

    options = (*MOMENTS, "master_weights", "stochastic_weights", "min_size", "compile")
    decoupled: bool
    default_decay: float

    @staticmethod
    def check(group: Group) -> None:
        for name, allowed in MOMENTS.items():
            check_name(name, group[name], allowed)
        check_flag("stochastic_weights", group["stochastic_weights"])
        check_group(group, "lr", "eps", "weight_decay", "min_size")
        betas = group["betas"]
        if not isinstance(betas, tuple | list) or len(betas) != 2:
            raise TypeError(f"betas are two numbers, got {betas!r}")
        for i, beta in enumerate(betas):
            check_number(f"betas[{i}]", beta)
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must be at least 0 and less than 1, got {betas}")

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
        defaults = {"lr": lr, "betas": betas, "eps": eps} | {
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
        units = self._units()
        asked = units and any(group["stochastic_weights"] for group in self.param_groups)
        if asked and not any(unit.how.stochastic[0] or unit.rounds_copies() for unit in units):
            warn_once(OptimizerWarning, _NOTHING_ROUNDED, about=self)
        grads = (g if len(g) else g.new_zeros(1) for g in map(_Unit.gradient, units))  # empty shard
        looks = [x for g in grads for x in torch.aminmax(g)]
        looks += [amax for unit in units for amax in unit.amaxes() if amax is not None]
        alike = len({x.device for x in looks}) == 1  # one synchronization with a GPU
        values = torch.stack([x.float() for x in looks]).tolist() if alike else map(float, looks)
        numbers = iter(values)
        largest = [max(-next(numbers), next(numbers)) for _ in units]  # NaN propagates
        if not states.everywhere(all(x < math.inf for x in largest), states.parameters_of(self)):
            return False
        for unit, x in zip(units, largest, strict=True):
            for state in unit.states:
                state["step"] += 1
            _step(unit, x, unit.scales(min(x, LARGEST), numbers))
        return True

    def _units(self) -> list[_Unit]:
        units: dict[Any, _Unit] = {}
        every = [(group, p) for group in self.param_groups for p in group["params"]]
        for index, (group, parameter) in enumerate(every):
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            stored_as = states.prepare(state, parameter, group)
            key: Any = index
            if parameter.numel() < group["min_size"]:
                kind = type(part_of(parameter)), parameter.dtype, parameter.device
                key = (id(group), *kind, float(state["step"]), MASTER in stored_as)
            if key not in units:
                units[key] = _Unit(
                    group=group,
                    decoupled=self.decoupled,
                    index=index,
                    how=_how(parameter, stored_as, group),
                    master=MASTER in stored_as,
                )
            units[key].parameters.append(parameter)
            units[key].states.append(state)
        return list(units.values())


_NOTHING_ROUNDED = (
    "stochastic_weights=True rounds no weight of this optimizer, because all are float32 or have "
    "float32 masters. It is for bfloat16 and float16 weights, ScaledTensors and float16 masters"
)


class Adam(_Adam):
    """`AdamW` with weight_decay, 0 by default, added to the gradient, as in `torch.optim.Adam`."""

    decoupled = False
    default_decay = 0.0


class AdamW(_Adam):
    """`torch.optim.AdamW` (decoupled weight decay) with states in low precision.

    The arguments of torch keep their positions, names and defaults. The arithmetic is float32. All
    options may differ between parameter groups.

    If a gradient in any group is not finite, no parameter is updated, no state changes, and
    ``skipped_steps`` counts the step. Deciding this synchronizes with a GPU. A finite element above
    `LARGEST` counts as that.

    Args:
        params: parameters, named parameters or groups of them; float32, bfloat16 or float16, or
            tensor subclasses of these dtypes (`fp8.ScaledTensor`).
        first_moment, second_moment: names in `MOMENTS`, of `ENCODINGS`. Bytes per element:
            "float32" 4; "bfloat16" 2; "float16" 2 and "e4m3" 1, both with one scale per tensor;
            "e4m3_block" and "e5m3_block" 1.03, with a scale for each block of 128.
        master_weights: "float32" or "float16" (with one scale per tensor): the copy that is updated
            for weights that are not float32. After a step the weights are rounded from it.
        stochastic_weights: rounds weights of 16 bits or fewer (bfloat16, float16, ScaledTensors) or
            their float16 masters stochastically, so that updates below their precision take effect
            in expectation. A warning says if there are none.
        min_size: parameters of fewer elements have float32 moments and are updated together.
        seed: of the random bits, which depend on it, the step and the position of the element: the
            same in eager and compiled code, and after resuming from a state_dict.
        compile: compiles the update of large parameters with `torch.compile`.

    Raises:
        ValueError: for values out of range, and if amsgrad, foreach, fused, capturable or
            differentiable is True.
        TypeError: for another dtype.
    """

    decoupled = True
    default_decay = 1e-2
