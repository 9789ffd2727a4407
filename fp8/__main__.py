"""``python -m fp8``: preflight, forecast, parity, tables (formats, recipes, levels), and what this
machine can run (doctor)."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from .common.libraries import need, transforms
from .common.report import as_table
from .formats.format import FORMATS, Format
from .lab import doctor
from .lab.forecast import command as forecast
from .lab.hardware import HARDWARE, get_hardware
from .lab.parity import ENGINES, parity, read_prompts
from .lab.preflight.demo import setup as demo
from .lab.preflight.preflight import (
    RECIPES_TRIED,
    Preflight,
    PreflightError,
    by_label,
    measure,
    terminable,
)
from .lab.preflight.sources import from_function, from_transformers, made_by
from .lab.preflight.stages import Settings
from .levels.initialize import LEVELS, Level
from .recipes.cast import Cast
from .recipes.policy import Policy
from .recipes.recipe import RECIPES, Recipe, get_recipe
from .version import __version__
from .warnings import OWN


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
    """The command line. arguments: None uses those of the process. Returns the exit code."""
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
    for name in (*TABLES, "doctor"):
        about = "what this machine can run" if name == "doctor" else f"the table of {name}"
        table = commands.add_parser(name, help=about)
        table.add_argument("--json", action="store_true", help="as JSON")
    _add_arguments(
        commands.add_parser("preflight", help="whether a model trains in FP8, and what that saves")
    )
    forecast.add_arguments(
        commands.add_parser("forecast", help="how long a training step takes on a GPU")
    )
    _add_parity_arguments(
        commands.add_parser("parity", help="whether a trainer and an inference engine agree")
    )
    options = parser.parse_args(arguments)
    if options.what == "preflight":
        with terminable():
            return _preflight(options)
    if options.what == "forecast":
        return _forecast(options)
    if options.what == "parity":
        return _parity(options)
    if options.what == "doctor":
        findings = doctor.examine()
        _print(json.dumps(findings, indent=2) if options.json else doctor.as_text(findings))
        return int(any(row["status"] == "broken" for row in findings["libraries"]))
    _print(_table(options.what, options.json))
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


# Preflight

HARDWARE_SHOWN = ["h100", "b200"]
BUDGET, DEMO_BUDGET = 540.0, 180.0
"""Seconds by default, and for ``--demo``. Imports and the page take some seconds more."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``fp8 preflight``."""
    parser.add_argument(
        "setup",
        nargs="?",
        help="FILE.py:FUNCTION or MODULE:FUNCTION that returns (model, batches[, loss[, "
        "optimizer]]); called with seed= if it takes that",
    )
    parser.add_argument(
        "--transformers",
        metavar="CONFIG.json",
        help="the configuration of a causal language model, which is trained from random weights",
    )
    parser.add_argument("--text", metavar="FILE", help="the text to train it on")
    parser.add_argument("--demo", action="store_true", help="a small GPT")
    budget = f"seconds for everything ({BUDGET:.0f}, with --demo {DEMO_BUDGET:.0f})"
    target = "gap that counts as none (%(default)s)"
    parser.add_argument("--steps", type=int, default=200, help="of each run (%(default)s)")
    parser.add_argument("--budget", type=float, help=budget)
    parser.add_argument("--target", type=float, default=0.01, help=target)
    parser.add_argument("--seeds", type=int, default=8, help="at most (%(default)s)")
    parser.add_argument(
        "--recipes",
        nargs="+",
        metavar="NAME",
        help=f"recipes to compare ({' '.join(RECIPES_TRIED)})",
    )
    parser.add_argument(
        "--hardware",
        nargs="+",
        default=HARDWARE_SHOWN,
        metavar="NAME",
        choices=HARDWARE,
        help=f"accelerators of the estimates ({' '.join(HARDWARE_SHOWN)}), of: "
        f"{' '.join(HARDWARE)}",
    )
    parser.add_argument("--out", default="preflight.html", help="page (%(default)s)")
    parser.add_argument("--resume", action="store_true", help="continue from the .json file of OUT")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")


def _preflight(options: argparse.Namespace) -> int:
    """Runs a preflight, writes the page and the figures, prints the verdict. Returns the exit
    code."""
    out = Path(options.out)
    figures = out.with_suffix(".json")
    try:
        settings = Settings(
            recipes=tuple(map(get_recipe, options.recipes or RECIPES_TRIED)),
            named=tuple(options.recipes or ()),
            steps=options.steps,
            held_out=8,
            budget=options.budget or (DEMO_BUDGET if options.demo else BUDGET),
            target=options.target,
            max_seeds=options.seeds,
            hardware=tuple(map(get_hardware, options.hardware)),
            transforms=by_label(transforms()),
        )
        result = measure(
            _source(options),
            settings,
            figures,
            figures if options.resume else None,
            lambda seconds, seeds: _command(options, seconds, max(seeds, options.seeds)),
            progress=not options.quiet,
        )
    except PreflightError as error:
        print(f"fp8 preflight: {error}{_place(error.__cause__ or error)}", file=sys.stderr)
        _write(error.report, out, figures)
        return 1
    except (ValueError, TypeError, ImportError, OSError) as error:
        print(f"fp8 preflight: {error}{_place(error)}", file=sys.stderr)
        return 2
    print(result)
    _write(result, out, figures)
    return 0


def _command(options: argparse.Namespace, seconds: float, seeds: int) -> str:
    """The command that continues a preflight."""
    words = ["fp8", "preflight", *([options.setup] if options.setup else [])]
    words += ["--demo"] if options.demo else []
    for name in ("transformers", "text"):
        value = getattr(options, name)
        words += [f"--{name}", value] if value else []
    defaults = {"steps": 200, "target": 0.01, "out": "preflight.html"}
    for name, default in defaults.items():
        value = getattr(options, name)
        words += [f"--{name}", f"{value}"] if value != default else []
    words += ["--recipes", *options.recipes] if options.recipes else []
    words += ["--hardware", *options.hardware] if options.hardware != HARDWARE_SHOWN else []
    words += ["--resume", "--budget", f"{seconds:g}"]
    return shlex.join(words + (["--seeds", str(seeds)] if seeds != 8 else []))


def _place(error: BaseException) -> str:
    """What the user's code has raised and where; "" for an error of this package."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or frames[-1].filename.startswith(OWN):
        return ""
    return f" ({type(error).__name__} at {frames[-1].filename}:{frames[-1].lineno})"


def _source(options: argparse.Namespace) -> Callable[..., Any]:
    """The function that returns the setup; exactly one source must be options."""
    sources = [options.setup, options.transformers, options.demo or None]
    if sum(source is not None for source in sources) != 1:
        raise ValueError("give one of FILE.py:FUNCTION, --transformers CONFIG.json, --demo")
    if options.demo:
        return demo
    if options.setup:
        return from_function(options.setup)
    if options.text is None:
        raise ValueError("--transformers needs a text to train on: --text FILE")
    return from_transformers(options.transformers, options.text)


def _write(result: Preflight, out: Path, figures: Path) -> None:
    written = [figures]
    try:
        result.save(out)
        written.append(out)
    except ImportError as error:
        print(f"no page: {error}, then repeat the command with --resume", file=sys.stderr)
    print(f"\nwritten: {', '.join(map(str, written))}")


def _forecast(given: argparse.Namespace) -> int:
    """Prints the forecast. Returns the exit code."""
    try:
        _print(forecast.run(given))
    except (ValueError, TypeError, ImportError, OSError) as error:
        print(f"fp8 forecast: {error}{_place(error)}", file=sys.stderr)
        return 2
    return 0


# Parity

PROMPTS = 8
"""The number of batches of a setup that are prompts, without a file of prompts."""


def _add_parity_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``fp8 parity``."""
    policies = f"a recipe, {', '.join(ENGINES)}, none (high precision), or a policy's .json file"
    parser.add_argument(
        "setup",
        help="as for preflight; the model maps ids to logits, and may be returned alone",
    )
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help=f"a prompt a line: text, or ids separated by spaces (the first {PROMPTS} batches)",
    )
    parser.add_argument("--tokenizer", metavar="FOLDER", help="of transformers (bytes of the text)")
    parser.add_argument("--length", type=int, help="tokens of a line, at most")
    parser.add_argument("--train", help=f"{policies} (the model as it is)")
    parser.add_argument("--rollout", default="engine_row", help=f"{policies} (%(default)s)")
    parser.add_argument("--cache", help="scaling of the engine's cache in FP8: tensor, head, token")
    parser.add_argument("--bound", type=float, required=True, help="of KL(rollout || train)")
    parser.add_argument("--total", action="store_true", help="no figures for single layers")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument("--save", metavar="PAGE.html", help="also write a page")


def _parity(given: argparse.Namespace) -> int:
    """Runs `fp8.parity` and prints its result. Returns the exit code."""
    try:
        made = made_by(given.setup)
        model, *batches = made if isinstance(made, tuple | list) else [made]
        result = parity(
            model,
            _prompts(given, batches),
            train=_policy(given.train),
            rollout=_policy(given.rollout),
            bound=given.bound,
            cache=given.cache,
            by_layer=not given.total,
        )
        if given.save:
            result.save(given.save)
    except (ValueError, TypeError, ImportError, OSError) as error:
        print(f"fp8 parity: {error}{_place(error)}", file=sys.stderr)
        return 2
    _print(json.dumps(result.to_dict(), indent=2) if given.json else str(result))
    return int(not result.ok)


def _prompts(given: argparse.Namespace, batches: Sequence[Any]) -> list[Any]:
    """The prompts of the file, or of the batches of a setup."""
    if given.prompts:
        encode = None
        if given.tokenizer:
            encode = need("transformers").AutoTokenizer.from_pretrained(given.tokenizer).encode
        return read_prompts(given.prompts, encode, given.length)
    if not batches:
        raise ValueError("the setup returns no batches: give --prompts FILE")
    return [b["input_ids"] if isinstance(b, dict) else b for b in islice(batches[0], PROMPTS)]


def _policy(text: str | None) -> Any:
    """The policy that an argument names."""
    if text == "none":
        return Policy(None)
    return Policy.from_json(Path(text)) if text and text.endswith(".json") else text


if __name__ == "__main__":
    raise SystemExit(main())
