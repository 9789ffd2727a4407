"""Rules: how the scale of a tile follows from its values, and how it is stored.

What depends on a rule is in its row: `RULES` has the rules of the package, `Rule.register` adds
one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from ..common.compiler import reads_values
from ..common.validation import check_choice
from ..formats.format import Format, get_format
from ..formats.quantize import quantize, quantize_operand
from ..formats.rounding import LAYOUTS, divided

#: The exponents of scale factors: normal numbers of float32, as their inverses are. E8M0 has
#: exponents from -127 to 127.
SMALLEST, LARGEST = -126, 126


# Stored forms


_LIMITS = {
    (largest, dtype): (layout.encode(2.0**-largest), layout.encode(2.0**largest))
    for dtype, layout in LAYOUTS.items()
    for largest in (LARGEST, 127)
}
"""The bits of the smallest and the largest power of two of a form."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """How scale factors are stored: a row of `FORMS`.

    Attributes:
        is_power: whether they are powers of two, by which every division is exact.
        is_narrow: whether they have eight bits. The scale of a tile with Inf or NaN is NaN then,
            and so becomes the tile (MX 1.0, section 5.1), as in microxcaling and in torchao after
            0.18, which treats Inf as a large number. Other scales follow from the finite values.
        largest: the exponent of the largest one; the exponent of the smallest is its negative.
        factor: a function of a scale that is no power of two -> the rounded factor by which values
            are multiplied, in place of the division.
    """

    is_power: bool = False
    factor: Callable[[Tensor], Tensor] | None = None
    is_narrow: bool = False
    largest: int = LARGEST

    def with_margin(self, scale: Tensor, margin: int) -> Tensor:
        """``scale * 2**margin``, clamped to the range of the form; NaN stays NaN."""
        if not margin:
            return scale
        larger = scale * 2.0**margin
        if self.largest > LARGEST:  # 2**-127 may be flushed to zero
            larger = torch.where(
                scale < 2.0**SMALLEST, 2.0 ** (margin - self.largest), larger
            )
        return larger.clamp(2.0**-self.largest, 2.0**self.largest)

    def inverse(self, scale: Tensor) -> Tensor | None:
        """The factor that replaces the division by ``scale``; None if none does."""
        if self.factor is not None:
            return self.factor(scale)
        if not self.is_power:
            return None
        inverse = scale.reciprocal()
        if self.largest > LARGEST:
            return torch.where(scale < 2.0**SMALLEST, 2.0**self.largest, inverse)
        return inverse

    def times(self, x: Tensor, factor: Tensor) -> Tensor:
        """``x`` times a scale of this form, or the `inverse` of one."""
        if self.largest > LARGEST:
            return times_power(x, factor)
        return x * factor


#: The least magnitude of a group of 128 values in vLLM's and SGLang's
#: ``per_token_group_quant`` (commits 0f5257e2 and 00568d90).
LEAST_OF_GROUP = 1e-10


def _factor_of_bf16(scale: Tensor) -> Tensor:
    """448 / amax, for the scale amax * (1 / 448) of a magnitude in bfloat16 or the least one of a
    group; the inverse of other scales."""
    amax = (448.0 * scale).to(torch.bfloat16).to(scale.dtype)
    inverse = divided(scale.new_ones(()), 448.0)
    least = torch.full_like(amax, LEAST_OF_GROUP)
    amax = torch.where(least * inverse == scale, least, amax)
    factor = divided(torch.full_like(amax, 448.0), amax)
    return torch.where(amax * inverse == scale, factor, scale.reciprocal())


FORMS: dict[str, Form] = {
    "power": Form(is_power=True),
    "float32": Form(),
    "inverse": Form(factor=torch.reciprocal),
    "inverse_bf16": Form(factor=_factor_of_bf16),
    "e4m3": Form(is_narrow=True),
    "e8m0": Form(is_power=True, is_narrow=True, largest=127),
}
"""Stored form -> its row. "e4m3": times a unit, one float32 for the tensor. "e8m0": as scaling "mx"
stores the scales of rules of form "power"."""


def times_power(x: Tensor, power: Tensor) -> Tensor:
    """``x * power``, for powers of two from 2**-127 to 2**127. The first is subnormal, and zero for
    CPUs under torch.set_flush_denormal(True) and for other devices: two factors are not."""
    if x.device.type == "cuda":  # which keeps subnormal numbers, in graphs too
        return x * power
    if reads_values(power):
        with suppress(RuntimeError):  # under vmap
            if bool((power >= 2.0**SMALLEST).all()):  # the usual case
                return x * power
    half = torch.where(power < 2.0**SMALLEST, 0.5, 1.0)
    return (x * half).mul_(power.clamp(min=2.0**SMALLEST))


# Scales of tiles, from their magnitudes


def _power(amax: Tensor, format: Format, carry: int) -> Tensor:
    """2**(e - E), for ``amax`` = m * 2**e and the format's largest value M * 2**E; `Rule.scale_of`
    mends what is out of range. carry: added to the bits of ``amax``; e is one larger if it carries
    into the exponent."""
    layout = LAYOUTS[amax.dtype]
    one = 1 << layout.mantissa_bits
    top = math.frexp(format.max)[1] - 1
    power = (amax.view(layout.integer) + (carry - top * one)) & -one
    return power.view(amax.dtype)


def up(amax: Tensor, format: Format) -> Tensor:
    """The smallest power of two that avoids overflow."""
    layout = LAYOUTS[amax.dtype]
    one = 1 << layout.mantissa_bits
    significand, exponent = math.frexp(format.max)  # from 0.5
    # `_power` without a call: every cast with a scale runs this.
    carry = 2 * one - 1 - int(2 * significand * one)
    power = (amax.view(layout.integer) + (carry - (exponent - 1) * one)) & -one
    return power.view(amax.dtype)


def _floor(amax: Tensor, format: Format) -> Tensor:
    return _power(amax, format, 0)


def _ceil(amax: Tensor, format: Format) -> Tensor:
    return _power(amax, format, (1 << LAYOUTS[amax.dtype].mantissa_bits) - 1)


def _even(amax: Tensor, format: Format) -> Tensor:
    one = 1 << LAYOUTS[amax.dtype].mantissa_bits
    return _power(amax, format, one >> (format.mantissa_bits + 1))


def exact(amax: Tensor, format: Format) -> Tensor:
    """amax divided by the format's largest value."""
    return divided(amax, format.max)


#: The least scale of a token in vLLM's ``dynamic_per_token_scaled_fp8_quant``
#: (csrc/quantization/w8a8/fp8, commit 096d3dc9).
LEAST_OF_TOKEN = 1 / (448 * 512)


def _exact_token(amax: Tensor, format: Format) -> Tensor:
    return exact(amax, format).clamp(min=LEAST_OF_TOKEN)


def _exact_block(amax: Tensor, format: Format) -> Tensor:
    return exact(amax.clamp(min=LEAST_OF_GROUP), format)


def _exact_group(amax: Tensor, format: Format) -> Tensor:
    return amax.clamp(min=LEAST_OF_GROUP) * divided(amax.new_ones(()), format.max)


_LEAST, _NORMAL = 2.0**-9, 2.0**-6  # the smallest e4m3 values, subnormal and not


def _e4m3(amax: Tensor, format: Format, unit: Tensor, guard: float = 1.0) -> Tensor:
    steps = divided(divided(amax, format.max), unit)
    if guard != 1.0:
        steps = guard * steps
    return quantize(steps, get_format("e4m3")).clamp(min=_LEAST) * unit


def _e4m3_up(amax: Tensor, format: Format, unit: Tensor) -> Tensor:
    steps = divided(divided(amax, format.max), unit)
    layout = LAYOUTS[amax.dtype]
    # An e4m3 value is not rounded up for the errors of these divisions.
    steps = steps * (1 - 4 * torch.finfo(steps.dtype).eps)
    power = (steps.view(layout.integer) & layout.infinity).view(steps.dtype)
    spacing = power.clamp(min=_NORMAL) * 2.0**-3
    return ((steps / spacing).ceil() * spacing).clamp(_LEAST, 448.0) * unit


#: The largest relative error of a number that is rounded down to an e4m3 value, as a factor.
GUARD = 17 / 16

#: The factor of the largest magnitude under rule "e4m3_eden": the largest value of e2m1 stands for
#: 6.07 sixths of it, which lowers the error of normal data (the published code of Quartet II).
EDEN = GUARD * 0.93


def eden(
    x: Tensor,
    values: Tensor,
    scale: Tensor,
    unit: Tensor,
    dims: tuple[int, ...],
    count: int,
) -> Tensor:
    """The scales of rule "e4m3_eden", unbiased along ``x``: times c = <x, x> / <x, Q(x)> of the
    ``count`` tiles that are rotated together (EDEN, arXiv:2108.08842), rounded stochastically to
    e4m3. x, values: in units of ``scale``, before and after rounding. dims: the one of a tile."""
    steps = scale / unit
    along = dims[0] - 1

    def inner_product(y: Tensor) -> Tensor:
        products = (y * x).sum(dims, keepdim=True) * steps.square()
        if count == 1:
            return products
        groups = products.unflatten(along, (-1, count))
        return (
            groups.nansum(along, keepdim=True)
            .expand_as(groups)
            .flatten(along - 1, along)
        )

    whole = inner_product(x)
    projected = inner_product(values)
    factor = torch.where(projected > 0, whole / projected, 1.0)
    return (
        quantize_operand(steps * factor, get_format("e4m3"), rounding="stochastic")
        * unit
    )


# Rows


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How the scale of a tile follows from its values, and how it is stored.

    A tile is what shares a scale: a tensor, a row, a block, as the scaling of a `fp8.Cast` says.
    Functions get float32 tensors (float64 for operands of that dtype) without gradients; they are
    traced by torch.compile, so that they may not branch on values.

    Attributes:
        name: what a `fp8.Cast`, and whatever is stored of one, calls the rule: an identifier.
        magnitude: a function (values, format) -> the magnitude that the largest value of the format
            stands for; larger ones saturate. values: (..., across, along), the matrix of each tile,
            with zeros for Inf and NaN, and where a tile exceeds the operand; products sum over the
            last dimension. The result is (..., 1, 1), or (..., 1, along) for a scale of each place
            along the sum. Where it is 0, Inf or NaN, and by default, it is the largest magnitude of
            the tile. Casts by such rules are simulated.
        scale: a function (amax, format) -> the scales of tiles with these magnitudes, finite
            numbers of any shape; what is out of range is clamped. By default the smallest power of
            two that avoids overflow. If scales are stored in "e4m3", a function (amax, format,
            unit) -> e4m3 values times the unit.
        stored: "power", powers of two, for all scalings but "nv"; "float32", other numbers, for all
            but "mx" and "nv", and "inverse" and "inverse_bf16", by whose inverse values are
            multiplied; "e4m3" for "nv".
        unit: for scales in "e4m3", the e4m3 value that stands for the largest magnitude of all
            tiles.
        candidates: factors of the magnitude. A tile takes the candidate with the smallest squared
            error under rounding to nearest, and the first of equal ones.
        correct: a function that replaces the scales after the values are rounded, as `eden`.
        about: the documentation of the rule.

    Raises:
        TypeError: for a name that is no string, and a function that cannot be called.
        ValueError: for a name that is no identifier, an unknown form, a unit without "e4m3" or
            "e4m3" without one, and candidates that are not positive numbers.
    """

    name: str
    magnitude: Callable[[Tensor, Format], Tensor] | None = None
    scale: Callable[..., Tensor] = up
    stored: str = "power"
    unit: float | None = None
    candidates: tuple[float, ...] = (1.0,)
    correct: Callable[..., Tensor] | None = None
    about: str = ""

    # Set per instance.
    form: ClassVar[Form]
    """The row of `stored`."""
    is_simulated: ClassVar[bool]
    """Whether more of a tile than its largest magnitude is read, for which no kernel is tested."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"Rule.name must be a name, not {self.name!r}")
        if not self.name.isidentifier():
            raise ValueError(f"Rule.name must be an identifier, got {self.name!r}")
        for field in ("magnitude", "scale", "correct"):
            function = getattr(self, field)
            if function is not None and not callable(function):
                raise TypeError(f"Rule.{field} must be a function, not {function!r}")
        check_choice("stored", self.stored, FORMS)
        if (self.stored == "e4m3") != (self.unit is not None):
            raise ValueError(
                f'stored="e4m3" has a unit, others none; got {self.unit!r}'
            )
        for number in (*self.candidates, self.unit or 1.0):
            if not 0 < number < math.inf:
                raise ValueError(
                    f"units and candidates must be positive, got {number!r}"
                )
        if not self.candidates:
            raise ValueError("Rule.candidates is empty; (1.0,) is the magnitude itself")
        by_error = len(self.candidates) > 1 and self.unit is None
        vars(self)["candidates"] = tuple(self.candidates)
        vars(self)["form"] = FORMS[self.stored]
        vars(self)["is_simulated"] = by_error or self.magnitude is not None

    def scale_of(
        self,
        amax: Tensor,
        format: Format,
        unit: Tensor | None = None,
        candidate: int = 0,
    ) -> Tensor:
        """The scales of tiles with these magnitudes, all finite, as they are stored; 1 for zeros.
        unit: the result of `unit_of`. candidate: the index of the factor."""
        factor = self.candidates[candidate]
        magnitude = amax
        if factor != 1.0:
            magnitude = (factor * amax).clamp(max=torch.finfo(amax.dtype).max)
        units = () if unit is None else (unit,)
        scale = self.scale(magnitude, format, *units)
        if self.form.is_power:
            # Clamped as integers: 2**-127 is subnormal, and a float may be flushed to zero.
            low, high = _LIMITS[self.form.largest, scale.dtype]
            integer = LAYOUTS[scale.dtype].integer
            clamped = scale.view(integer).clamp(low, high).view(scale.dtype)
        else:
            clamped = scale.clamp(2.0**SMALLEST, 2.0**LARGEST)
        return torch.where(amax > 0, clamped, 1.0)

    def unit_of(self, amax: Tensor, format: Format) -> Tensor | None:
        """The unit of the scales of all tiles of a tensor, 0-dim; None for scales without one."""
        if self.unit is None:
            return None
        whole = (self.candidates[0] * amax).amax()
        unit = divided(whole, self.unit * format.max).clamp(2.0**SMALLEST, 2.0**LARGEST)
        return torch.where(whole > 0, unit, 1.0)

    def register(self) -> Rule:
        """Adds the rule to `RULES`, for ``fp8.Cast(rule=name)``, after a trial of its functions.
        Files and checkpoints store its name: register it before they are read.

        Returns:
            The rule itself.

        Raises:
            ValueError: if another rule has the name, or a function returns another shape or dtype,
                or numbers that are not positive and finite, or that the form does not have.
        """
        if RULES.get(self.name, self) != self:
            raise ValueError(
                f"rule {self.name!r} is registered already; choose another name"
            )
        format = get_format("e4m3")
        values = torch.linspace(-3.0, 3.0, 192, dtype=torch.float32).view(2, 3, 32)
        amax = values.abs().amax((-2, -1), keepdim=True)
        if self.magnitude is not None:
            amax = self.magnitude(values, format)
            self._check_result("magnitude", amax, [(2, 1, 1), (2, 1, 32)])
        scale = self.scale_of(amax, format, self.unit_of(amax, format))
        self._check_result("scale", scale, [tuple(amax.shape)])
        if self.form.is_power and bool((scale.frexp().mantissa != 0.5).any()):
            power = f"has scales that are no powers of two, got {scale.flatten()[0]:g}"
            raise ValueError(f'rule {self.name!r} {power}; take stored="float32"')
        _add(self)
        return self

    def _check_result(
        self, field: str, got: Tensor, shapes: list[tuple[int, ...]]
    ) -> None:
        what = f"Rule.{field} of {self.name!r}"
        if not isinstance(got, Tensor) or tuple(got.shape) not in shapes:
            kind = tuple(got.shape) if isinstance(got, Tensor) else type(got).__name__
            raise ValueError(f"{what} must return a shape of {shapes}, got {kind}")
        if got.dtype != torch.float32:
            raise ValueError(
                f"{what} must return the dtype of its argument, got {got.dtype}"
            )
        if not bool(((got > 0) & (got < torch.inf)).all()):
            raise ValueError(
                f"{what} must be positive and finite, got {got.flatten()[0]:g}"
            )


class _Rows(dict[str, Rule]):
    def __missing__(self, name: str) -> Rule:
        base = name.removesuffix(E8M0)
        raise ValueError(f"rule {base!r} is not registered: {REGISTER.format(base)}")


E8M0 = " e8m0"
"""Suffix of a name in `LOWERED` of a rule whose scales scaling "mx" stores."""

REGISTER = "call fp8.Rule(name={!r}, ...).register() before it is read"

RULES: dict[str, Rule] = {}
"""Name -> rule."""

LOWERED: dict[str, Rule] = _Rows()
"""`Cast.stored_rule` -> rule: `RULES`, and the rules of powers of two as E8M0 stores them."""


FORM_OF: dict[str | None, Form] = {None: FORMS["power"]}
"""Name in `LOWERED` -> the form of its scales; None: of static ones."""


def _add(rule: Rule) -> None:
    """Adds a rule to the tables, and the rule that scaling "mx" makes of it."""
    RULES[rule.name] = rule
    lowered = {rule.name: rule}
    if rule.form.is_power:
        lowered[rule.name + E8M0] = replace(rule, stored="e8m0")
    LOWERED.update(lowered)
    FORM_OF.update({name: row.form for name, row in lowered.items()})


_nv = partial(Rule, stored="e4m3")

for _rule in (
    Rule(
        name="up",
        about='The smallest power of two that avoids overflow ("round up" of Mishra et al., '
        "arXiv:2506.08027; torchao's RCEIL).",
    ),
    Rule(
        name="floor",
        scale=_floor,
        about="2**(e - E), with e and E the exponents of amax and of the format's largest value. "
        "Values between that value and the next power of two saturate (OCP MX specification 1.0, "
        "section 6.3).",
    ),
    Rule(
        name="ceil",
        scale=_ceil,
        about="``floor``, with amax rounded up to a power of two (torchao's CEIL).",
    ),
    Rule(
        name="even",
        scale=_even,
        about="``floor``, with amax rounded to the mantissa bits of the format (torchao's EVEN).",
    ),
    Rule(
        name="exact",
        scale=exact,
        stored="float32",
        about="amax divided by the format's largest value, in float32; not a power of two.",
    ),
    Rule(
        name="exact_token",
        scale=_exact_token,
        stored="float32",
        about="``exact``, at least 1 / (448 * 512), as vLLM casts the tokens of an input in e4m3.",
    ),
    Rule(
        name="exact_block",
        scale=_exact_block,
        stored="float32",
        about="``exact`` for an amax of at least 1e-10, as vLLM casts groups of 128 of an input.",
    ),
    Rule(
        name="exact_inverse",
        scale=exact,
        stored="inverse",
        about="``exact``, with values multiplied by the rounded inverse of the scale, as SGLang "
        "casts the tokens of an input. 5 in 10**4 bfloat16 values differ from ``exact``.",
    ),
    Rule(
        name="exact_group",
        scale=_exact_group,
        stored="inverse_bf16",
        about="amax, at least 1e-10, times the rounded inverse of the format's largest value; "
        "bfloat16 values are multiplied by 448 / amax, as SGLang casts groups of 128 to e4m3. Of "
        "them 3 in 10**4 differ from ``exact``.",
    ),
    _nv(
        name="e4m3",
        scale=_e4m3,
        unit=448.0,
        about="``exact``, rounded to the nearest e4m3 value in units of the tensor's amax / (448 * "
        "the format's largest value) (NVFP4, arXiv:2509.25149, section 2). Where it is rounded "
        "down, the largest values of the block saturate: stochastic rounding is biased toward "
        "zero. The e4m3 value is at least its smallest subnormal, 2**-9: TransformerEngine keeps "
        "subnormals, torchao stops at 2**-6.",
    ),
    _nv(
        name="e4m3_up",
        scale=_e4m3_up,
        unit=448.0,
        about="``e4m3``, but rounded up to an e4m3 value. No value saturates, so stochastic "
        "rounding is unbiased. The squared error of normal data under it is 1.18 times that under "
        "``e4m3``.",
    ),
    _nv(
        name="e4m3_guarded",
        scale=partial(_e4m3, guard=GUARD),
        unit=256.0 / GUARD,
        about="``e4m3`` for 17/16 of amax, with 256 in place of 448 in the unit: no value of a "
        "block saturates whose scale is not subnormal in e4m3 (the published code of Quartet II, "
        "arXiv:2601.22813). The squared error of normal data under stochastic rounding is 1.25 "
        "times that under ``e4m3``.",
    ),
    _nv(
        name="e4m3_4_6",
        scale=_e4m3,
        unit=256.0,  # 1.5 times the largest scale is an e4m3 value
        candidates=(1.0, 1.5),
        about="``e4m3`` for amax, or for 1.5 * amax, which maps the largest magnitude to 4 instead "
        "of 6 in e2m1: each tile takes the scale with the smaller squared error, or the first. "
        "The unit has 256 in place of 448, so that 1.5 times the largest scale is an e4m3 value "
        "(four over six, arXiv:2512.02010, section 3). Errors are measured with rounding to "
        "nearest, whatever the cast's rounding is.",
    ),
    _nv(
        name="e4m3_4_6_up",
        scale=_e4m3_up,
        unit=256.0,
        candidates=(1.0, 1.5),
        about="``e4m3_4_6`` with both scales rounded up to e4m3 values: no value saturates.",
    ),
    _nv(
        name="e4m3_eden",
        scale=_e4m3,
        unit=256.0,
        candidates=(EDEN,),
        correct=eden,
        about="MS-EDEN (Quartet II, arXiv:2601.22813): ``e4m3`` for 0.988 * amax, with 256 in "
        "place of 448 in the unit. Values are rounded to nearest by this scale and multiplied by "
        "another one, which makes them unbiased: it is larger by <x, x> / <x, Q(x)> of the blocks "
        "that are rotated together, and rounded stochastically to e4m3. Needs a rotation with "
        "random signs.",
    ),
):
    _add(_rule)
