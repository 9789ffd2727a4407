"""``fp8 preflight``: the command line of `fp8.preflight`."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from ..hardware import HARDWARE
from ..setups import from_function, place
from .demo import setup as demo
from .preflight import RECIPES_TRIED, Preflight, PreflightError, preflight
from .verdict import decide

ABOUT = "whether a model trains in FP8, and what that saves"

# Option -> its default; the command that continues repeats others.
DEFAULTS = {
    "steps": 200,
    "target": 0.01,
    "recipes": None,
    "hardware": ["h100", "b200"],
    "out": "preflight.html",
}
# Seconds by default, and for --demo. Imports and the page take some seconds more.
BUDGET, DEMO_BUDGET = 540.0, 180.0
# The largest number of pairs of runs by default.
SEEDS = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``fp8 preflight``."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "setup",
        nargs="?",
        help="FILE.py:FUNCTION or MODULE:FUNCTION that returns (model, batches[, loss[, "
        "optimizer]]); called with seed= if it takes that",
    )
    what.add_argument("--demo", action="store_true", help="a small GPT")
    budget = f"seconds for everything ({BUDGET:.0f}, with --demo {DEMO_BUDGET:.0f})"
    target = "gap that counts as none (%(default)s)"
    parser.add_argument("--steps", type=int, help="of each run (%(default)s)")
    parser.add_argument("--budget", type=float, help=budget)
    parser.add_argument("--target", type=float, help=target)
    parser.add_argument(
        "--seeds", type=int, default=SEEDS, help="at most (%(default)s)"
    )
    recipes = f"recipes to compare ({' '.join(RECIPES_TRIED)})"
    parser.add_argument("--recipes", nargs="+", metavar="NAME", help=recipes)
    hardware = "accelerators of the estimates (h100 b200)"
    parser.add_argument("--hardware", nargs="+", choices=HARDWARE, help=hardware)
    parser.add_argument("--out", help="page (%(default)s)")
    parser.set_defaults(**DEFAULTS)
    parser.add_argument(
        "--resume", action="store_true", help="continue from the .json file of OUT"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress")


def run(options: argparse.Namespace) -> tuple[str, int]:
    """Runs a preflight, writes the page and the figures. Returns the verdict and the exit code."""
    out = Path(options.out)
    code = 0
    figures = out.with_suffix(".json")
    setup = demo
    budget = DEMO_BUDGET
    if not options.demo:
        setup = from_function(options.setup)
        budget = BUDGET
    if options.budget is not None:
        budget = options.budget
    try:
        result = preflight(
            setup,
            recipes=options.recipes,
            steps=options.steps,
            budget=budget,
            target=options.target,
            max_seeds=options.seeds,
            hardware=options.hardware,
            save=figures,
            resume=figures if options.resume else None,
            progress=not options.quiet,
        )
    except PreflightError as raised:
        result = raised.report
        code = 1
        print(
            f"fp8 preflight: {raised}{place(raised.__cause__ or raised)}",
            file=sys.stderr,
        )

    def proceed(seconds: float, seeds: int) -> str:
        return _command(options, seconds, max(seeds, options.seeds))

    # Again, as the verdict names a call of Python until here.
    decide(result.findings, proceed)
    result.save(figures)
    written = _written(result, out, figures)
    return written if code else f"{result}\n{written}", code


def _command(options: argparse.Namespace, seconds: float, seeds: int) -> str:
    """The command that continues a preflight."""
    words = ["fp8", "preflight", options.setup or "--demo"]
    for name, default in DEFAULTS.items():
        value = getattr(options, name)
        if value != default:
            values = value if isinstance(value, list) else [value]
            words += [f"--{name}", *map(str, values)]
    words += ["--resume", "--budget", f"{seconds:g}"]
    if seeds != SEEDS:
        words += ["--seeds", str(seeds)]
    return shlex.join(words)


def _written(result: Preflight, out: Path, figures: Path) -> str:
    """Writes the page. Returns the line that names the files."""
    written = [figures]
    try:
        result.save(out)
        written.append(out)
    except ImportError as error:
        print(
            f"no page: {error}, then repeat the command with --resume", file=sys.stderr
        )
    return f"\nwritten: {', '.join(map(str, written))}"
