"""``python -m fp8``: the studies of the lab, and the tables of formats, recipes and levels."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from .common.report import as_table
from .formats.format import FORMATS, Format
from .lab import doctor
from .lab.forecast import command as forecast
from .lab.parity import command as parity
from .lab.preflight import command as preflight
from .lab.preflight.preflight import terminable
from .lab.setups import place
from .levels.initialize import LEVELS, Level
from .recipes.cast import Cast
from .recipes.recipe import RECIPES, Recipe
from .version import __version__

COMMANDS: dict[str, Any] = {
    "preflight": preflight,
    "forecast": forecast,
    "parity": parity,
    "doctor": doctor,
}
"""Command -> the module of its study. ``run`` returns what to print, and the exit code."""


def _format_row(format: Format) -> tuple[Any, ...]:
    return (
        format.name,
        f"1/{format.exponent_bits}/{format.mantissa_bits}",
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
    """The command line. arguments: None uses those of the process. Returns the exit code."""
    options = _parser().parse_args(arguments)
    with terminable():
        try:
            text, code = options.run(options)
        except (ValueError, TypeError, ImportError, OSError) as error:
            print(f"fp8 {options.what}: {error}{place(error)}", file=sys.stderr)
            return 2
        try:
            print(text, flush=True)
        except BrokenPipeError:  # discard further output, as recommended by Python's manual
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fp8",
        description="Whether a model trains in FP8 (preflight), how fast a GPU would train it "
        "(forecast), whether a trainer and an inference engine agree (parity), the tables of the "
        "fp8 package, and what this machine can run (doctor).",
        epilog="Exit code: 0; 1 if doctor finds a library that is installed and broken, preflight "
        "cannot measure the model, or parity finds a difference beyond the bound.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="what", required=True, metavar="COMMAND")
    for name in TABLES:
        table = commands.add_parser(name, help=f"the table of {name}")
        table.add_argument("--json", action="store_true", help="as JSON")
        table.set_defaults(run=_table)
    for name, study in COMMANDS.items():
        command = commands.add_parser(name, help=study.ABOUT)
        study.add_arguments(command)
        command.set_defaults(run=study.run)
    return parser


def _table(options: argparse.Namespace) -> tuple[str, int]:
    heads, rows = TABLES[options.what]
    if options.json:
        return json.dumps([dict(zip(heads, row, strict=True)) for row in rows()], indent=2), 0
    return as_table([heads, *(list(map(_text, row)) for row in rows())]), 0


if __name__ == "__main__":
    raise SystemExit(main())
