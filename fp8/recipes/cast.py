"""Casts: how one operand of a product gets into its format."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any, ClassVar

import torch

from ..common.validation import check_between, check_choice, check_keys, names_of
from ..formats.format import Format, dtype_name, get_format
from ..formats.quantize import OVERFLOWS
from ..formats.rounding import ROUNDINGS
from ..torch_internals import Keywords
from .rules import LOWERED, REGISTER, RULES
from .scaling import SCALINGS, Tile

SIGNS = ("fixed", "random")

_STATELESS = {"delayed": "tensor", "static": "unit"}
"""A scaling with state between passes -> the one that has the same scales without it."""


@dataclass(frozen=True, kw_only=True)
class Cast:
    """How an operand is cast to its format.

    Attributes:
        format: a name in `fp8.FORMATS`, or a `fp8.Format`.
        scaling: a name in `fp8.recipes.scaling.SCALINGS`: which elements share a scale.
        rule: a name in `fp8.recipes.rules.RULES`, or of a registered `fp8.Rule`: how the scale is
            computed from the values of the tile. None: the default of the scaling.
        tile: the number of elements that share a scale (across, along) the axis that the product
            sums over, for scalings with a free tile. None: the default of the scaling.
        margin: the scale is multiplied by 2**margin, which leaves headroom for that many doublings.
        history: for scaling "delayed", the number of passes considered; None is 16. For other
            scalings 0; "static" stores one scale.
        rounding, overflow: as in `fp8.quantize`, except that Inf does not saturate: it stays Inf if
            the format has Inf, and becomes NaN otherwise. Stochastic rounding has a new seed each
            time. It is unbiased where no value saturates: not with rules that may round a scale
            down ("floor", "e4m3", "e4m3_4_6"), and without a scale up to the largest value.
        hadamard: 2 to 128, a power of two: the operand is first rotated by a random Hadamard matrix
            of this size along the axis that the product sums over, which cancels in the product; 0:
            no rotation. The same for both operands. Convolutions and attention omit rotations.
        signs: the signs of the rotation. "fixed": the same signs in all products (arXiv:2509.25149,
            section 4.2); "random": drawn for each product, the same signs for both operands.

    Raises:
        ValueError: for an unknown name, a rule or tile that the scaling does not support, random
            signs without a rotation, a rotation with a scaling that keeps state between passes, and
            overflow="nonfinite" with a format that has neither Inf nor NaN.
        TypeError: for a name that is not a string.
    """

    format: str | Format
    scaling: str = "unit"
    rule: str | None = None
    tile: Tile = None  # type: ignore[assignment]  # completed below
    margin: int = 0
    history: int | None = None
    rounding: str = "nearest"
    overflow: str = "saturate"
    hadamard: int = 0
    signs: str = "fixed"

    # Set per instance, as each product reads them.
    text: ClassVar[str]
    """The token that stands for the cast where only constants cross: in graphs, arguments of
    operators and files. `cast_of` reads it."""
    stored_rule: ClassVar[str | None]
    """The name in LOWERED of the rule, as the scaling stores its scales. None: the scale comes
    from a history (scaling "static"), or is 1."""
    number_format: ClassVar[Format]
    """What ``format`` names."""

    def __post_init__(self) -> None:
        format = get_format(self.format)
        check_choice("scaling", self.scaling, SCALINGS)
        check_choice("rounding", self.rounding, ROUNDINGS)
        check_choice("overflow", self.overflow, OVERFLOWS)
        if self.overflow == "nonfinite" and format.nonfinite is None:
            raise ValueError(
                f"format {format.name!r} has neither Inf nor NaN for 'nonfinite'"
            )
        rule = self._complete_rule()
        tile = self._complete_tile()
        usual, *bounds = (16, 1, 4096) if self.scaling == "delayed" else (0, 0, 0)
        history = usual if self.history is None else self.history
        check_between(f"history of scaling {self.scaling!r}", history, *bounds)
        vars(self).update(rule=rule, tile=tile, history=history)
        self._check_rotation()
        self._derive()

    def _derive(self) -> None:
        """Sets the attributes that follow from the fields."""
        values = {name: getattr(self, name) for name in names_of(Cast)}
        if isinstance(self.format, Format):  # one without a name in FORMATS
            values["format"] = self.format.text
        vars(self).update(
            text=json.dumps(values),
            stored_rule=SCALINGS[self.scaling].lowered(self.rule),
            number_format=get_format(self.format),
        )

    def __setstate__(self, state: Keywords) -> None:
        """Reads a pickle, which has the name of the rule. Raises ValueError for an unknown name."""
        vars(self).update(state)
        self._complete_rule()
        self._derive()

    def _complete_rule(self) -> str | None:
        rules = SCALINGS[self.scaling].rules
        rule = self.rule
        check_between("margin", self.margin, -32, 32)
        if self.margin and not rules:
            raise ValueError(f"scaling {self.scaling!r} has no margin")
        if rule is None:
            return next(iter(rules), None)
        if rule not in rules:
            check_choice(
                "rule", rule, RULES, f"; for one of your own, {REGISTER.format(rule)}"
            )
            has = f"it has {', '.join(map(repr, rules)) or 'none'}"
            raise ValueError(f"scaling {self.scaling!r} has no rule {rule!r}; {has}")
        return rule

    def _complete_tile(self) -> Tile:
        row = SCALINGS[self.scaling]
        tile = self.tile
        if tile is None:
            return row.tile
        if not isinstance(tile, tuple | list) or len(tile) != 2:
            raise TypeError(f"a tile is two numbers (across, along), not {tile!r}")
        tile = (tile[0], tile[1])
        if tile == row.tile:
            return row.tile
        if not row.free:
            raise ValueError(
                f"scaling {self.scaling!r} has the tile {row.tile}, not {tile}"
            )
        for size in tile:
            check_between("a side of a tile", size, 1, 1 << 16)
        if tile == (1, 1):
            raise ValueError(
                "a tile of (1, 1) gives each element a scale; use a wider format"
            )
        return tile

    def _check_rotation(self) -> None:
        if self.hadamard not in (0, 2, 4, 8, 16, 32, 64, 128):
            raise ValueError(
                f"hadamard: 0 or a power of two from 2 to 128, got {self.hadamard!r}"
            )
        check_choice("signs", self.signs, SIGNS)
        if self.signs == "random" and not self.hadamard:
            raise ValueError("random signs need a rotation: give hadamard too")
        if self.hadamard and self.keeps_history:
            raise ValueError(
                f"scaling {self.scaling!r} has no rotation: it keeps state"
            )
        if self.rule is not None and RULES[self.rule].correct is not None:
            across, along = self.tile
            if self.rounding != "nearest" or across != 1 or self.hadamard % along:
                needs = "values to nearest, in blocks of one row and rotations of whole blocks"
                raise ValueError(f"rule {self.rule!r} rounds {needs}; got {self}")

    @property
    def keeps_history(self) -> bool:
        """Whether the operand has state between passes: largest magnitudes, or its scale."""
        return self.scaling in ("delayed", "static")

    @property
    def is_plain(self) -> bool:
        """Whether a conversion to the dtype of the format can round."""
        return self.rounding == "nearest" and self.overflow == "saturate"

    @property
    def is_random(self) -> bool:
        """Whether two casts of one operand differ."""
        if self.rounding == "stochastic" or self.signs == "random":
            return True
        rule = self.stored_rule
        return rule is not None and LOWERED[rule].correct is not None

    @property
    def is_simulated(self) -> bool:
        """Whether no kernel has the scales of the rule."""
        rule = self.stored_rule
        return rule is not None and LOWERED[rule].is_simulated

    @property
    def stateless(self) -> Cast:
        """The cast without state between passes: the largest magnitude is measured in each pass,
        and a static scale is 1."""
        if not self.keeps_history:
            return self
        return replace(self, scaling=_STATELESS[self.scaling], history=None)

    def rotated(self, hadamard: int, signs: str) -> Cast:
        """The cast of an operand that is rotated like this; with a rotation, it has no state."""
        cast = self.stateless if hadamard else self
        return replace(cast, hadamard=hadamard, signs=signs)

    @property
    def unrotated(self) -> Cast:
        """The cast without its rotation."""
        return self.rotated(0, "fixed")

    def __str__(self) -> str:
        """Format, scaling, and what differs from defaults: "e2m1, nv 16x16, stochastic"."""
        row = SCALINGS[self.scaling]
        scaling = self.scaling
        if self.tile != row.tile:
            scaling += " {}x{}".format(*self.tile)
        if self.rule is not None and self.rule != row.rules[0]:
            scaling += f" by {self.rule}"
        differences = {
            self.rounding: self.rounding != "nearest",
            self.overflow: self.overflow != "saturate",
            f"margin {self.margin}": self.margin,
            f"history {self.history}": self.history,
            f"rotated by {self.hadamard}": self.hadamard,
            "random signs": self.signs == "random",
        }
        shown = [name for name, is_set in differences.items() if is_set]
        return ", ".join([str(self.format), scaling, *shown])

    def to_dict(self) -> Keywords:
        """The fields as plain values, for JSON."""
        values = asdict(self)
        if isinstance(self.format, Format):
            dtype = self.format.dtype
            values["format"]["dtype"] = None if dtype is None else dtype_name(dtype)
        return values

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Cast:
        """The Cast that `to_dict` wrote; keys other than "format" and "scaling" are optional.
        Raises as Cast, and ValueError for an unknown or missing key."""
        check_keys("Cast", values, names_of(Cast), ("format", "scaling"))
        format = values["format"]
        if isinstance(format, Mapping):
            check_keys("Format", format, names_of(Format))
            dtype = format.get("dtype")
            format = Format(**{**format, "dtype": getattr(torch, str(dtype), dtype)})
        return Cast(**{**values, "format": format})


@cache
def cast_of(text: str, rotated: bool = True) -> Cast:
    """The cast with this `Cast.text`. rotated: False for one without its rotation. Raises as
    Cast, for a rule that is not registered in this process."""
    values = json.loads(text)
    if "|" in values["format"]:
        values["format"] = Format.from_text(values["format"])
    cast = Cast(**values)
    if rotated:
        return cast
    return cast.unrotated


def lines_of(casts: Iterable[Cast | None]) -> str:
    """The `Cast.text` of each, a line for each; an empty one for None."""
    return "\n".join("" if cast is None else cast.text for cast in casts)


def casts_of_lines(lines: Iterable[str], rotated: bool = True) -> list[Cast | None]:
    """The casts of the lines of `lines_of`, as `cast_of` reads them."""
    return [cast_of(line, rotated) if line else None for line in lines]
