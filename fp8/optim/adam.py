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
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ..common.dtensor import part_of
from ..common.validation import check_flag, check_name, check_number
from ..formats.quantize import CHUNK
from ..formats.random_bits import Key, bits_from_key, fewer_bits, key_at, random_key
from ..tensors.scaled_tensor import store
from . import encodings
from .base import LowPrecision, check_group, refuse
from .encodings import BLOCK, ENCODINGS, MOMENTS, Encoded, Encoding, decode
from .state import (
    FIRST,
    MASTER,
    PARTS,
    SECOND,
    Group,
    State,
    everywhere,
    is_plain,
    parameters_of,
    prepare,
    read,
)

HALF = 15
"""Random bits for each of the two moments, from one 32-bit word."""


class _How(NamedTuple):
    """The encodings of the weight and the moments, and which of them are rounded stochastically."""

    weight: Encoding
    first: Encoding
    second: Encoding
    stochastic: tuple[bool, bool, bool]

    feedback: bool = False
    """Whether the weight is a copy in float32, whose rounding error goes into the first moment."""

    @property
    def by_name(self) -> tuple[tuple[str, Encoding], ...]:
        """The encodings with their names in a state."""
        return (MASTER, self.weight), (FIRST, self.first), (SECOND, self.second)


class _Kept(NamedTuple):
    """The weight and the two moments, as they are stored."""

    weight: Encoded
    first: Encoded
    second: Encoded


def _adam(kept: _Kept, grad: Tensor, numbers: Tensor, how: _How, keys: Sequence[Key]) -> Tensor:
    """Adam (Kingma and Ba, arXiv:1412.6980, algorithm 1) with decoupled decay; updates ``kept`` in
    place.

        m = b1 m + (1 - b1) g,  v = b2 v + (1 - b2) g^2
        w = decay w - size m / (root sqrt(v) + eps)

    Computed in float32, from the new moments before they are rounded. numbers: as `_Unit.numbers`
    returns them. Returns the largest magnitude of a weight that has a scale, else 0.
    """
    decay, b1, c1, b2, c2, size, root, eps, *units = numbers.unbind()
    g = grad.to(torch.float32)
    m = decode(kept.first) * b1 + g * c1
    v = decode(kept.second) * b2 + g * g * c2
    w = decode(kept.weight) * decay - m * size / (v.sqrt() * root + eps)
    bits = low = high = None
    of_weight, of_first, of_second = how.stochastic
    if of_first or of_second:
        word = bits_from_key(g.shape, keys[0], device=g.device)
        high = fewer_bits(word, HALF) if of_first else None
        low = fewer_bits(word << 16, HALF) if of_second else None
    if of_weight:
        bits = bits_from_key(g.shape, keys[1], device=g.device)
    encodings.write(w, kept.weight, how.weight, units[0], bits=bits)
    encodings.write(m, kept.first, how.first, units[1], bits=high)
    encodings.write(v, kept.second, how.second, units[2], away=True, bits=low)
    return w.abs().amax() if how.weight.scale == "tensor" else w.new_zeros(())


@functools.cache
def _compiled(dynamic: bool | None) -> Callable[..., Tensor]:
    skip = torch.compiler.skip_guard_on_globals_unsafe  # no function of this package changes
    warnings.filterwarnings("ignore", "bf16 and fp16 are mixed")  # inductor
    return torch.compile(_adam, dynamic=dynamic, options={"guard_filter_fn": skip})


LARGEST = torch.finfo(torch.float32).max ** 0.5
"""The square of a larger gradient overflows float32."""

PLAIN = {
    torch.float32: ENCODINGS["float32"],
    torch.bfloat16: ENCODINGS["bfloat16"],
    torch.float16: replace(ENCODINGS["float16"], scale="none"),
}
"""The encodings of weights without a master, by dtype."""

BLOCKS = 1 << 16
"""Elements that a compiled step with blocks processes at once per CPU thread: constant, because for
dynamic sizes torch compiles loops without vectors, which are ten times slower."""

Scales = list[float | None]
"""The scale factors of the weight and the moments; None: none for the whole tensor."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Unit:
    """Parameters that are updated together: one, or the small ones of a group concatenated. index:
    of the first among all of the optimizer, which makes random bits distinct."""

    parameters: list[Tensor]
    states: list[State]
    group: Group
    decoupled: bool
    index: int
    master: bool
    how: _How

    def kept(self, name: str) -> Encoded:
        """A moment or the master, flat; for a single parameter it shares memory with the state."""
        if len(self.states) == 1:
            return read(self.states[0], name)
        return Encoded(torch.cat([read(state, name).values for state in self.states]))

    def weight(self) -> Encoded:
        """The tensor to update: the masters, the weight itself, or a copy of the weights."""
        if self.master:
            return self.kept(MASTER)
        here = [part_of(parameter.detach()) for parameter in self.parameters]
        if len(here) == 1 and is_plain(here[0]) and not self.how.feedback:
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

    def amaxes(self) -> dict[str, Tensor]:
        """Name in a state -> the amax of what has a scale for the whole tensor."""
        state = self.states[0]
        return {n: state[n + PARTS[2]] for n, kept in self.how.by_name if kept.scale == "tensor"}

    def scales(self, largest: float, numbers: Iterator[float]) -> Scales:
        """New scale factors for gradients up to ``largest``: the moment of the largest magnitudes
        bounds a moment, so a scale costs one pass over the gradient."""
        (b1, b2), amaxes = self.group["betas"], self.amaxes()
        found: Scales = []
        for name, encoding in self.how.by_name:
            if name not in amaxes:
                found.append(None)
                continue
            amax = next(numbers)
            if name == MASTER:
                amax *= encodings.HEADROOM
            else:
                beta, x = (b1, largest) if name == FIRST else (b2, largest**2)
                amax = beta * amax + (1 - beta) * x
                amaxes[name].fill_(amax)
            found.append(encodings.scale_for(amax, encoding))
        return found

    def numbers(self, scales: Scales) -> Tensor:
        """The 8 scalars of a step, computed in float64 and rounded once, then 1 / scales."""
        group = self.group
        step, (b1, b2), lr = float(self.states[0]["step"]), group["betas"], float(group["lr"])
        decay = 1 - lr * group["weight_decay"] if self.decoupled else 1.0
        size, root = lr / (1 - b1**step), (1 - b2**step) ** -0.5
        formulas = (decay, b1, 1 - b1, b2, 1 - b2, size, root, group["eps"])
        return torch.tensor([*formulas, *(1.0 if x is None else 1 / x for x in scales)])

    def keys(self) -> list[Key]:
        """The keys of the random bits of this step: for the moments, and for the weight."""
        seed = (self.group["seed"], int(self.states[0]["step"]), self.index)
        return [random_key((*seed, stream)) for stream in range(2)]

    def finish(self, weight: Encoded, first: Encoded, second: Encoded) -> None:
        """Writes updated copies back to the parameters and states."""
        joined = len(self.states) > 1
        here = [part_of(parameter.detach()) for parameter in self.parameters]
        if self.how.feedback:
            _split(self._rounded(weight.values, here[0]), here)
            error = weight.values - self.weight().values
            _, b1, _, _, _, size, root, eps, *_ = self.numbers([None] * 3).tolist()
            _add_error(error, first, second, self.how.first, [b1, size, root, eps])
        elif joined or self.master or not is_plain(here[0]):
            _split(decode(weight) if self.master else weight.values, here)
        if joined:
            kept = {FIRST: first, SECOND: second, **({MASTER: weight} if self.master else {})}
            for name, stored in kept.items():
                _split(stored.values, [read(state, name).values for state in self.states])

    def _rounded(self, weight: Tensor, like: Tensor) -> Tensor:
        """A float32 copy of weights, rounded stochastically if that is asked for."""
        encoding = PLAIN[like.dtype if is_plain(like) else torch.float32]
        if not self.group["stochastic_weights"] or encoding.dtype == torch.float32:
            return weight
        rounded = Encoded(torch.empty_like(weight, dtype=encoding.dtype))
        bits = bits_from_key(weight.shape, self.keys()[1], device=weight.device)
        encodings.write(weight, rounded, encoding, None, bits=bits)
        return rounded.values


def _split(flat: Tensor, targets: list[Tensor]) -> None:
    for target, piece in zip(targets, flat.split([t.numel() for t in targets]), strict=True):
        store(target, piece.view(target.shape))


def units_of(group: Group, states: dict[Any, State], index: int, decoupled: bool) -> list[_Unit]:
    """The units of parameters with a gradient. index: of the group's first parameter."""
    found: dict[Any, _Unit] = {}
    for number, parameter in enumerate(group["params"], index):
        if parameter.grad is None:
            continue
        state = states[parameter]
        kept = prepare(state, parameter, group)
        key: Any = number
        if parameter.numel() < group["min_size"]:
            plain = is_plain(part_of(parameter)) and parameter.dtype
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
    here, (b1, b2) = part_of(parameter), group["betas"]
    coarse = here.dtype != torch.float32 or not is_plain(here)
    feedback = coarse and bool(group.get("error_feedback", False))
    wide = feedback or not is_plain(here)
    weight = kept.get(MASTER) or PLAIN[torch.float32 if wide else here.dtype]
    first, second = kept[FIRST], kept[SECOND]
    stochastic = (
        group["stochastic_weights"] and weight.dtype != torch.float32,
        first.rounds_stochastically(b1),
        second.rounds_stochastically(b2),
    )
    return _How(weight, first, second, stochastic, feedback)


def step_units(units: list[_Unit], parameters: Iterable[Tensor]) -> bool:
    """Updates all units, or none and returns False if a gradient or its square is not finite. All
    processes that have a shard of one of the ``parameters`` agree on the result."""
    grads = (g if len(g) else g.new_zeros(1) for g in map(_Unit.gradient, units))  # empty shard
    looks = [x for g in grads for x in torch.aminmax(g)]
    looks += [amax for unit in units for amax in unit.amaxes().values()]
    one_device = len({x.device for x in looks}) == 1  # one synchronization with a GPU
    found = torch.stack([x.float() for x in looks]).tolist() if one_device else map(float, looks)
    numbers = iter(found)
    largest = [max(-next(numbers), next(numbers)) for _ in units]  # NaN propagates
    if not everywhere(all(x < LARGEST for x in largest), parameters):
        return False
    for unit, x in zip(units, largest, strict=True):
        for state in unit.states:
            state["step"] += 1
        _step(unit, unit.scales(x, numbers))
    return True


def _step(unit: _Unit, scales: Scales) -> None:
    """Updates one unit in chunks. The remainder of a compiled unit runs in eager mode."""
    kept = _Kept(unit.weight(), unit.kept(FIRST), unit.kept(SECOND))
    grad, numbers, how = unit.gradient(), unit.numbers(scales), unit.how
    count = len(grad)
    keys = unit.keys() if any(how.stochastic) else []
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
        parts = kept if end - begin == count else _Kept(*(x.part(begin, end) for x in kept))
        given = (parts, grad[begin:end], numbers, how)
        at = [key_at(key, begin) for key in keys]
        if compiled and begin < whole:
            words = [torch.as_tensor(key, device=grad.device) for key in at]  # ints would recompile
            step = _compiled(False if fixed else None)
            largest.append(step(*given, words))
        else:
            largest.append(_adam(*given, at))
    if kept.weight.amax is not None and largest:
        kept.weight.amax.copy_(torch.stack(largest).amax())
    for stored, scale in zip(kept, scales, strict=True):
        if stored.scale is not None and scale is not None:
            stored.scale.fill_(scale)
    unit.finish(*kept)


# Error feedback: what weights lose when they are rounded goes into the first moment. Weights in low
# precision then need no master copy: a step that is too small to change one is not lost, but makes
# later steps larger.

_FEEDBACK = tuple(name for name in MOMENTS["first_moment"] if ENCODINGS[name].scale != "tensor")
"""The first moments that hold what is added: a scale for the tensor is set before the step."""


def _check_feedback(group: Group) -> None:
    """Raises ValueError or TypeError if a group asks for error feedback and cannot have it."""
    check_flag("error_feedback", wanted := group.get("error_feedback", False))
    if not wanted:
        return
    if group["master_weights"] is not None or group["betas"][0] == 0:
        raise ValueError(
            "error_feedback needs master_weights=None, whose place it takes, and betas[0] above 0; "
            f"got {group['master_weights']!r} and {group['betas'][0]}"
        )
    if group["first_moment"] not in _FEEDBACK:
        raise ValueError(
            f"error_feedback needs first_moment {', '.join(map(repr, _FEEDBACK))}, which hold what "
            f"it adds; got {group['first_moment']!r}"
        )


def _add_error(
    error: Tensor, first: Encoded, second: Encoded, encoding: Encoding, numbers: list[float]
) -> None:
    """Adds the error of weights, those before rounding minus those after, to the first moment (ECO,
    Nikdan et al. 2026, arXiv:2601.22101, algorithm 3):

        m += (1 - 1 / b1) / size * (root sqrt(v) + eps) * error

    encoding: of the first moment, which is rounded to nearest. numbers: b1, size, root and eps of
    the step, as in `_adam`. A step of size 0 has no error.
    """
    b1, size, root, eps = numbers
    if size:
        share = (1 - 1 / b1) / size
        m = decode(first) + error * share * (decode(second).sqrt() * root + eps)
        encodings.write(m, first, encoding, None)


def check_adam(group: dict[str, Any]) -> None:
    """Raises ValueError or TypeError for invalid settings of a group."""
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
    _check_feedback(group)


class _Adam(LowPrecision):
    """Base class of `Adam` and `AdamW`, which isinstance tells apart."""

    options = (
        "first_moment",
        "second_moment",
        "master_weights",
        "stochastic_weights",
        "error_feedback",
        "min_size",
        "compile",
    )
    check = staticmethod(check_adam)

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
        error_feedback: bool = False,
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
            "error_feedback": error_feedback,
            "min_size": min_size,
            "seed": seed,
            "compile": compile,
            "skipped_steps": 0,
        }
        super().__init__(params, defaults)

    def step_all(self) -> bool:
        index, units = 0, []
        for group in self.param_groups:
            units += units_of(group, self.state, index, self.decoupled)
            index += len(group["params"])
        return step_units(units, parameters_of(self))


class Adam(_Adam):
    """`AdamW` with weight_decay, 0 by default, added to the gradient, as in `torch.optim.Adam`."""

    decoupled = False
    default_decay = 0.0


class AdamW(_Adam):
    """`torch.optim.AdamW` (decoupled weight decay) with states in low precision.

    The arguments of torch keep their positions, names and defaults. The arithmetic is float32. All
    options may differ between parameter groups.

    If a gradient in any group, or its square, is not finite, no parameter is updated, no state
    changes, and ``skipped_steps`` counts the step. Deciding this synchronizes with a GPU.

    Args:
        params: parameters, named parameters or groups of them; float32, bfloat16 or float16, or
            tensor subclasses of these dtypes (`fp8.ScaledTensor`).
        first_moment, second_moment: names in `MOMENTS`, of `ENCODINGS`. Bytes per element:
            "float32" 4; "bfloat16" 2; "float16" 2 and "e4m3" 1, both with one scale per tensor;
            "e4m3_block" and "e5m3_block" 1.03, with a scale for each block of 128.
        master_weights: "float32" or "float16" (with one scale per tensor): the copy that is updated
            for weights that are not float32. After a step the weights are rounded from it.
        stochastic_weights: rounds bfloat16 or float16 weights, or masters, stochastically, so that
            updates below their precision take effect in expectation.
        error_feedback: adds what a weight that is not float32 loses when it is rounded to its first
            moment, so that no master weights are needed (ECO, arXiv:2601.22101). Needs a first
            moment without a scale for the whole tensor.
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
