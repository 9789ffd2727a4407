"""``python -m fp8``: preflight, tables (formats, recipes, levels), and what this machine can run
(doctor)."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from .common.report import as_table
from .formats.format import FORMATS, Format
from .levels.initialize import LEVELS, Level
from .recipes.cast import Cast
from .recipes.recipe import RECIPES, Recipe
from .studies import command, doctor
from .version import __version__


def _format_row(format: Format) -> tuple[Any, ...]:
    return (
        format.name,
        f"{int(format.signed)}/{format.exponent_bits}/{format.mantissa_bits}",
        format.bias,
        *(float(number) for number in (format.max, format.min_normal, format.min_subnormal)),
        *(format.infinity, format.nan, format.negative_zero),
    )


def _cast_cell(cast: Cast | None) -> str:
    return "-" if cast is None else str(cast)


def _recipe_row(recipe: Recipe) -> tuple[str, ...]:
    casts = map(_cast_cell, (recipe.input, recipe.weight, recipe.grad))
    others = [f"{field}: {_cast_cell(cast)}" for field, cast in recipe.overrides.items()]
    others += [f"sums of {recipe.sums}"] if recipe.sums else []
    return (recipe.name, *casts, "; ".join(others))


LEVEL_HEADS = [
    *("level", "product", "communication"),
    *("weight", "master", "weight gradient", "Adam states"),
]


def level_row(level: Level) -> tuple[str, ...]:
    """The cells of a row with columns `LEVEL_HEADS`."""
    master = "-" if level.master is None else f"{level.master} + scale"
    moments = f"{level.first_moment} + {level.second_moment}"
    weight = f"{level.weight} + scale"
    return (level.name, level.product, level.communication, weight, master, level.grad, moments)


TABLES = {
    "formats": (
        ["format", "s/e/m", "bias", "max", "min-normal", "min-subnormal", "Inf", "NaN", "-0"],
        lambda: map(_format_row, FORMATS.values()),
    ),
    "recipes": (
        ["recipe", "input", "weight", "grad", "otherwise"],
        lambda: map(_recipe_row, RECIPES.values()),
    ),
    "levels": (LEVEL_HEADS, lambda: map(level_row, LEVELS.values())),
}
"""Command -> column titles, and rows."""


def _text(cell: Any) -> str:
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    return f"{cell:.6g}" if isinstance(cell, float) else str(cell)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. arguments: None uses those of the process.

    Returns the exit code: 0, or 1 if the doctor finds a broken library. Invalid usage exits with 2.
    """
    parser = argparse.ArgumentParser(
        prog="fp8",
        description="Whether a model trains in FP8 (preflight), the tables of the fp8 package, and "
        "what this machine can run (doctor).",
        epilog="Exit code: 0; 1 if doctor finds a library that is installed and broken, or "
        "preflight cannot measure the model.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="what", required=True, metavar="COMMAND")
    for name in (*TABLES, "doctor"):
        about = "what this machine can run" if name == "doctor" else f"the table of {name}"
        table = commands.add_parser(name, help=about)
        table.add_argument("--json", action="store_true", help="as JSON")
    command.add_arguments(
        commands.add_parser("preflight", help="whether a model trains in FP8, and what that saves")
    )
    given = parser.parse_args(arguments)
    if given.what == "preflight":
        return command.run(given)
    if given.what == "doctor":
        findings = doctor.examine()
        _print(json.dumps(findings, indent=2) if given.json else doctor.as_text(findings))
        return 0 if doctor.is_well(findings) else 1
    _print(_table(given.what, given.json))
    return 0


def _table(name: str, as_json: bool) -> str:
    heads, rows = TABLES[name]
    if as_json:
        return json.dumps([dict(zip(heads, row, strict=True)) for row in rows()], indent=2)
    return as_table([heads, *(list(map(_text, row)) for row in rows())])


def _print(text: str) -> None:
    """Prints ``text``; ignores a reader that has closed the pipe (head)."""
    try:
        print(text, flush=True)
    except BrokenPipeError:  # discard further output, as recommended by Python's manual
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    raise SystemExit(main())
