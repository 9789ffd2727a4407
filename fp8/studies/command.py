"""``fp8 preflight``: the command line of `fp8.preflight`."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..common.pitfalls import OWN
from .demo import setup as demo
from .hardware import HARDWARE
from .preflight import RECIPES_TRIED, Preflight, PreflightError, preflight
from .sources import from_function, from_transformers

BUDGET, DEMO_BUDGET = 540.0, 180.0
"""Seconds by default, and for ``--demo``. With its imports and its last run the command takes up to
a tenth more."""


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
    _add_settings(parser)


def _add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=200, help="of each run (%(default)s)")
    parser.add_argument(
        "--budget",
        type=float,
        help=f"seconds for everything ({BUDGET:.0f}, with --demo {DEMO_BUDGET:.0f})",
    )
    parser.add_argument(
        "--target", type=float, default=0.01, help="gap that counts as none (%(default)s)"
    )
    parser.add_argument("--seeds", type=int, default=8, help="at most (%(default)s)")
    parser.add_argument(
        "--recipes",
        nargs="+",
        default=list(RECIPES_TRIED),
        metavar="NAME",
        help=f"recipes to compare ({' '.join(RECIPES_TRIED)})",
    )
    parser.add_argument(
        "--hardware",
        nargs="+",
        default=["h100", "b200"],
        metavar="NAME",
        choices=HARDWARE,
        help=f"accelerators of the estimates (h100 b200), of: {' '.join(HARDWARE)}",
    )
    parser.add_argument("--out", default="preflight.html", help="page (%(default)s)")
    parser.add_argument("--resume", action="store_true", help="continue from the .json file of OUT")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")


def run(given: argparse.Namespace) -> int:
    """Runs a preflight, writes the page and the figures, prints the verdict.

    Returns 0; 1 if the model or its data cannot be measured. Usage errors exit with 2.
    """
    out = Path(given.out)
    figures = out.with_suffix(".json")
    try:
        result = preflight(
            _source(given),
            recipes=given.recipes,
            steps=given.steps,
            budget=given.budget or (DEMO_BUDGET if given.demo else BUDGET),
            target=given.target,
            max_seeds=given.seeds,
            hardware=given.hardware,
            save=figures,
            resume=figures if given.resume else None,
            progress=not given.quiet,
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


def _place(error: BaseException) -> str:
    """What the user's code has raised and where; "" for an error of this package."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or frames[-1].filename.startswith(OWN):
        return ""
    return f" ({type(error).__name__} at {frames[-1].filename}:{frames[-1].lineno})"


def _source(given: argparse.Namespace) -> Callable[..., Any]:
    """The function that returns the setup; exactly one source must be given."""
    sources = [given.setup, given.transformers, given.demo or None]
    if sum(source is not None for source in sources) != 1:
        raise ValueError("give one of FILE.py:FUNCTION, --transformers CONFIG.json, --demo")
    if given.demo:
        return demo
    if given.setup:
        return from_function(given.setup)
    if given.text is None:
        raise ValueError("--transformers needs a text to train on: --text FILE")
    return from_transformers(given.transformers, given.text)


def _write(result: Preflight, out: Path, figures: Path) -> None:
    written = [figures]
    try:
        result.save(out)
        written.append(out)
    except ImportError as error:
        print(f"no page: {error}, then repeat the command with --resume", file=sys.stderr)
    print(f"\nwritten: {', '.join(map(str, written))}")
