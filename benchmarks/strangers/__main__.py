"""What `unit_scale`, `simulate_fp8` and `uu.verify` make of models of other libraries.

python -m benchmarks.strangers [--only REGEX] [--limit N] [--out FILE]

Small configurations with random weights. Each model is built, transformed and measured in a process
of its own. Without --only and --limit the result is written to benchmarks/results. Run again, it
continues with the models that have no row in --out: those are the record of each model, the result
has the counts of each library.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import resource
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Lines, Row, report, show
from fp8.common.step import described

from . import models
from .case import Stranger
from .examine import examine, is_inside

SECONDS = 60.0
"""What a model may take, of the processor's time."""

PATIENCE = 5
"""How many seconds of the clock to wait for one of the processor, on a machine with other work."""


OUT = Path("out/benchmark-strangers.jsonl")

QUESTION = """\
what `unit_scale`, `simulate_fp8` and `uu.verify` make of models of other libraries, in small
configurations with random weights, in terms of what is cast: the share of the casts of a step,
forward and backward, whose SQNR is within 1.5 dB of the format's own on normal values (e4m3 31.5
dB, e5m2 25.5 dB; or on these very values with unlimited exponents; operands of zeros aside). unit:
models where it is at least 97 % of the unit-scaled model under `simulate_fp8`, in its second step;
trained: after 20 steps with `uu.optim.AdamW`; static: of the plain model under recipe "static"
after `fp8.calibrate`; lowest: the least share of unit and trained; least, most: log2 of the numbers
that stand beside parameters of RMS 1; agrees: `uu.verify` judges alike; fp8 fall, fp32 fall: models
whose last loss of 20 steps is below the first, unit-scaled in FP8 and plain, at one learning rate
for all models"""


def measured(stranger: Stranger, seconds: float) -> Row:
    """The row of a model, as far as it was made before an error, a crash or the end of the time."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(stranger, sender, seconds))
    start = time.monotonic()
    process.start()
    sender.close()
    row = stranger.row()
    ended = "timeout"
    while receiver.poll(max(0.0, start + PATIENCE * seconds - time.monotonic())):
        try:
            row = receiver.recv()
        except EOFError:
            ended = "crashed"
            break
        if row.pop("finished", False):
            ended = ""
            break
    process.kill() if ended == "timeout" else None
    process.join()
    if process.exitcode == -signal.SIGXCPU:
        ended = "timeout"
    if ended:
        row["ended"] = ended
        if row["result"] in ("not built", "not finished"):
            row["result"] = f"failed: {ended}"
    row.setdefault("seconds", round(time.monotonic() - start, 1))
    return row


def _run(stranger: Stranger, sender: Any, seconds: float) -> None:
    """In the process of a model, which the system ends after so many seconds of processor time."""
    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    _, limit = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used + seconds) + 1, limit))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    last = stranger.row()

    def send(row: Row) -> None:
        last.update(row)
        sender.send(dict(row))

    try:
        examine(stranger, send)
    except Exception as error:
        last["result"] = f"not built: {described(error)}"
    last["seconds"] = round(sum(resource.getrusage(resource.RUSAGE_SELF)[:2]) - used, 1)
    sender.send({**last, "finished": True})
    os._exit(0)


def by_library(rows: list[Row]) -> list[Row]:
    """One row for each library: how many of its models run, and of these how many are inside."""
    result = []
    for library in dict.fromkeys(row["library"] for row in rows):
        models = [row for row in rows if row["library"] == library]
        runs = [row for row in models if row["result"] == "runs"]
        found: Row = {"name": library, "models": len(models), "run": len(runs)}
        for key in ("unit", "trained", "static"):
            found[key] = sum(key in row and is_inside(row[key]) for row in runs)
        for key in ("fp8_fall", "fp32_fall"):
            falls = [row[key] for row in runs if isinstance(row.get(key), float)]
            found[key] = sum(fall < 1 for fall in falls)
        found["agrees"] = sum(row.get("agrees", False) for row in runs)
        shares = [row.get(key) for row in runs for key in ("unit", "trained")]
        found["lowest"] = min((s for s in shares if isinstance(s, float)), default=None)
        numbers = [row["numbers"] for row in runs]
        found["least"] = min((low for low, _ in numbers), default=None)
        found["most"] = max((high for _, high in numbers), default=None)
        result.append(found)
    return result


def main() -> None:
    given = parsed()
    if given.install:
        print("pip install --no-deps", *models.requirements())
        return
    torch.set_num_threads(1)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    rows, lines = [], Lines(given.out)
    done = {f"{row['library']}/{row['name']}": row for row in lines.rows}
    found = [s for s in models.STRANGERS if re.search(given.only, _path(s))]
    for stranger in found[: given.limit]:
        why = models.missing(stranger.package)
        if given.list or why:
            print(_path(stranger), f"skipped, {why}" if why else "", flush=True)
            continue
        row = done.get(_path(stranger))
        if row is None:
            row = measured(stranger, given.seconds)
            lines.add(row)
            printed(row, given.verbose)
        rows.append(row)
    question = " ".join(QUESTION.split())
    if given.only or given.limit:
        show("strangers", question, by_library(rows))
    elif rows:
        versions = models.versions(rows)
        report("strangers", f"{question}; versions: {versions}", by_library(rows))


def _path(stranger: Stranger) -> str:
    return f"{stranger.package}/{stranger.name}"


def parsed() -> argparse.Namespace:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--only", default="", metavar="REGEX", help="in library/name")
    add("--limit", type=int, metavar="N", help="the first N models")
    add("--list", action="store_true", help="print the names")
    add("--install", action="store_true", help="print how to get the libraries")
    add("--seconds", type=float, default=SECONDS, help="that a model may take")
    add("--verbose", action="store_true", help="print the casts outside")
    add("--out", type=Path, default=OUT, metavar="FILE", help="rows, one a line")
    return parser.parse_args()


def printed(row: Row, verbose: bool) -> None:
    values = {k: v for k, v in row.items() if k not in ("details", "library")}
    print(
        "  ".join(f"{v}" if k == "name" else f"{k}={v}" for k, v in values.items()),
        flush=True,
    )
    if verbose:
        print(json.dumps(row.get("details", {}), indent=2), flush=True)


if __name__ == "__main__":
    main()
