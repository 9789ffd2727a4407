"""``fp8 record``: the page of a record of `fp8.record`, and where two of them part."""

from __future__ import annotations

import argparse
from pathlib import Path

from .diff import diff
from .page import page
from .runs import read

ABOUT = "what the casts of a training have lost, by files of fp8.record"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``fp8 record``."""
    commands = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    drawn = commands.add_parser("page", help="a map of layers and steps, as one page")
    drawn.add_argument("record", help="a file of fp8.record")
    drawn.add_argument("-o", "--output", help="an HTML file (run.html for run.jsonl)")
    compared = commands.add_parser("diff", help="the first step at which two runs part")
    compared.add_argument("first", help="a file of fp8.record")
    compared.add_argument("second", help="another one")
    compared.add_argument(
        "--tolerance",
        type=float,
        default=0.01,
        help="of lost shares, absolute, and of losses, relative (%(default)s)",
    )


def run(options: argparse.Namespace) -> tuple[str, int]:
    """What to print, and the exit code: 1 where two records part. Raises as `read` and `diff`."""
    if options.action == "diff":
        first = read(options.first)
        second = read(options.second)
        found = diff(first, second, options.tolerance)
        return str(found), int(found.parts)
    source = Path(options.record)
    path = Path(options.output or source.with_suffix(".html"))
    path.write_text(page(read(source), source.name), encoding="utf-8")
    return f"written: {path}", 0
