"""``fp8 preflight``: the command line of `fp8.preflight`."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...common.libraries import transforms
from ...recipes.recipe import get_recipe
from ..hardware import HARDWARE, get_hardware
from ..setups import from_function, place
from .demo import setup as demo
from .preflight import RECIPES_TRIED, Preflight, PreflightError, by_label, measure
from .sources import from_transformers
from .stages import Settings

ABOUT = "whether a model trains in FP8, and what that saves"

HARDWARE_SHOWN = ["h100", "b200"]
BUDGET, DEMO_BUDGET = 540.0, 180.0
"""Seconds by default, and for ``--demo``. Imports and the page take some seconds more."""
SEEDS = 32
"""The largest number of pairs of runs by default."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
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
    parser.add_argument("--seeds", type=int, default=SEEDS, help="at most (%(default)s)")
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


def run(options: argparse.Namespace) -> tuple[str, int]:
    """Runs a preflight, writes the page and the figures. Returns the verdict and the exit code."""
    out = Path(options.out)
    figures = out.with_suffix(".json")
    settings = Settings(
        recipes=tuple(map(get_recipe, options.recipes or RECIPES_TRIED)),
        steps=options.steps,
        held_out=8,
        budget=options.budget or (DEMO_BUDGET if options.demo else BUDGET),
        target=options.target,
        max_seeds=options.seeds,
        hardware=tuple(map(get_hardware, options.hardware)),
        transforms=by_label(transforms()),
    )
    try:
        result = measure(
            _source(options),
            settings,
            figures,
            figures if options.resume else None,
            lambda seconds, seeds: _command(options, seconds, max(seeds, options.seeds)),
            progress=not options.quiet,
        )
    except PreflightError as error:
        print(f"fp8 preflight: {error}{place(error.__cause__ or error)}", file=sys.stderr)
        return _written(error.report, out, figures), 1
    return f"{result}\n{_written(result, out, figures)}", 0


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
    return shlex.join(words + (["--seeds", str(seeds)] if seeds != SEEDS else []))


def _source(options: argparse.Namespace) -> Callable[..., Any]:
    """The function that returns the setup; exactly one source must be named."""
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


def _written(result: Preflight, out: Path, figures: Path) -> str:
    """Writes the page. Returns the line that names the files."""
    written = [figures]
    try:
        result.save(out)
        written.append(out)
    except ImportError as error:
        print(f"no page: {error}, then repeat the command with --resume", file=sys.stderr)
    return f"\nwritten: {', '.join(map(str, written))}"
