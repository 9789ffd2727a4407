"""``python -m fp8 formats`` and ``python -m fp8 recipes``: the tables, printed."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from .formats import FORMATS, Format
from .recipe import RECIPES, Cast, Recipe
from .report import as_table

__all__ = ["main"]


def _format_row(format: Format) -> tuple[str, ...]:
    has = (format.infinity, format.nan, format.negative_zero)
    numbers = (format.max, format.min_normal, format.min_subnormal)
    widths = f"{int(format.signed)}/{format.exponent_bits}/{format.mantissa_bits}"
    return (
        format.name,
        widths,
        str(format.bias),
        *(f"{number:.6g}" for number in numbers),
        *("yes" if yes else "no" for yes in has),
    )


def _cast_cell(cast: Cast | None) -> str:
    return "-" if cast is None else str(cast)


def _recipe_row(recipe: Recipe) -> tuple[str, ...]:
    casts = map(_cast_cell, (recipe.input, recipe.weight, recipe.grad))
    others = (f"{field}: {_cast_cell(cast)}" for field, cast in recipe.overrides.items())
    return (recipe.name, *casts, "; ".join(others))


TABLES = {
    "formats": (
        ["format", "s/e/m", "bias", "max", "min-normal", "min-subnormal", "Inf", "NaN", "-0"],
        lambda: map(_format_row, FORMATS.values()),
    ),
    "recipes": (
        ["recipe", "input", "weight", "grad", "otherwise"],
        lambda: map(_recipe_row, RECIPES.values()),
    ),
}
"""Command -> the heads of its columns, and its rows."""


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; arguments default to those of the process."""
    parser = argparse.ArgumentParser(prog="fp8", description="Tables of the fp8 package.")
    parser.add_argument("table", choices=TABLES, help="what to print")
    heads, rows = TABLES[parser.parse_args(arguments).table]
    print(as_table([heads, *rows()]))


if __name__ == "__main__":
    main()
