"""``python -m fp8``: the studies of the lab."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from .checkpoints import command as layout
from .lab import doctor
from .lab.forecast import command as forecast
from .lab.parity import command as parity
from .lab.preflight import command as preflight
from .lab.preflight.preflight import terminable
from .lab.record import command as record
from .lab.setups import place
from .version import __version__

COMMANDS: dict[str, Any] = {
    "preflight": preflight,
    "forecast": forecast,
    "parity": parity,
    "record": record,
    "layout": layout,
    "doctor": doctor,
}
"""Command -> the module of its study. ``run`` returns what to print, and the exit code."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line. arguments: None uses the arguments of the process. Returns the exit
    code."""
    options = _parser().parse_args(arguments)
    with terminable():
        try:
            text, code = options.run(options)
        except (ValueError, TypeError, ImportError, OSError) as error:
            print(f"fp8 {options.what}: {error}{place(error)}", file=sys.stderr)
            return 2
        try:
            print(text, flush=True)
        except (
            BrokenPipeError
        ):  # discard further output, as recommended by Python's manual
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fp8",
        description="Whether a model trains in FP8 (preflight), how fast a GPU would train it "
        "(forecast), whether a trainer and an inference engine agree (parity), what "
        "the casts of a training have lost (record), whether a checkpoint is as an inference "
        "engine has it (layout), and what this machine can run (doctor).",
        epilog="Exit code: 0; 1 if doctor finds a library that is installed and broken, preflight "
        "cannot measure the model, parity finds a difference beyond the bound, two records part, "
        "or a checkpoint has another layout.",
    )
    parser.add_argument(
        "--version", action="version", version=f"%(prog)s {__version__}"
    )
    commands = parser.add_subparsers(dest="what", required=True, metavar="COMMAND")
    for name, study in COMMANDS.items():
        command = commands.add_parser(name, help=study.ABOUT)
        study.add_arguments(command)
        command.set_defaults(run=study.run)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
