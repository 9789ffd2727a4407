"""What `unit_scale`, `simulate_fp8` and `uu.verify` make of models of other libraries.

python -m benchmarks.strangers [--only REGEX] [--limit N] [--train] [--out FILE]

Small configurations with random weights. Each model is built, transformed and measured in a process
of its own. Without --only and --limit the result is written to benchmarks/results. Run again, it
continues with the models whose rows in --out lack what is asked for: those are the record of each
model, the result has the counts of each library.
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
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Row, write
from fp8.common.step import described

from . import models
from .case import Stranger
from .examine import Options, examine, is_inside

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


def measured(stranger: Stranger, options: Options, seconds: float) -> Row:
    """The row of a model, as far as it was made before an error, a crash or the end of the time."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(stranger, options, sender, seconds))
    start = time.monotonic()
    process.start()
    sender.close()
    row: Row = {
        "name": stranger.name,
        "library": stranger.package,
        "result": "not built",
    }
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


def _run(stranger: Stranger, options: Options, sender: Any, seconds: float) -> None:
    """In the process of a model, which the system ends after so many seconds of processor time."""
    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    _, limit = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used + seconds) + 1, limit))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    quiet = os.open(os.devnull, os.O_WRONLY)
    if not os.environ.get("STRANGERS_VERBOSE"):
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
    last: Row = {
        "name": stranger.name,
        "library": stranger.package,
        "result": "not built",
    }

    def send(row: Row) -> None:
        last.update(row)
        sender.send(dict(row))

    try:
        examine(stranger, options, send)
    except Exception as error:
        last["result"] = f"not built: {described(error)}"
    last["seconds"] = round(sum(resource.getrusage(resource.RUSAGE_SELF)[:2]) - used, 1)
    sender.send({**last, "finished": True})
    os._exit(0)


def summary(rows: list[Row]) -> str:
    """The totals in one line."""
    kinds = Counter(
        row["result"].partition(":")[0].partition(" in ")[0] for row in rows
    )
    runs = [row for row in rows if row["result"] == "runs"]
    parts = [
        f"{len(rows)} models: {', '.join(f'{n} {kind}' for kind, n in kinds.items())}"
    ]
    for key in ("unit", "trained", "static"):
        shares = [row[key] for row in runs if isinstance(row.get(key), float)]
        parts.append(f"{key} inside {sum(map(is_inside, shares))} of {len(shares)}")
    parts.append(f"verify agrees on {sum(row.get('agrees', False) for row in runs)}")
    for key in ("fp32_fall", "fp8_fall"):
        falls = [row[key] for row in runs if isinstance(row.get(key), float)]
        parts.append(
            f"{key} below 1: {sum(fall < 1 for fall in falls)} of {len(falls)}"
        )
    return "; ".join(parts)


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
    rows, done = [], recorded(given.out)
    found = [s for s in models.STRANGERS if re.search(given.only, _path(s))]
    for stranger in found[: given.limit]:
        why = models.missing(stranger.package)
        if given.list or why:
            print(_path(stranger), f"skipped, {why}" if why else "", flush=True)
            continue
        row = done.get(_path(stranger))
        if row is None or not has_all(row, Options(given.train)):
            row = measured(stranger, Options(given.train), given.seconds)
            record(row, given.out)
            printed(row, given.verbose)
        rows.append(row)
    if rows:
        finish(rows, given)


def _path(stranger: Stranger) -> str:
    return f"{stranger.package}/{stranger.name}"


def recorded(path: Path) -> dict[str, Row]:
    """library/name -> the row of a model that was measured before, the latest one."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {f"{row['library']}/{row['name']}": row for row in map(json.loads, lines)}


def record(row: Row, path: Path) -> None:
    """Adds a row to those that `recorded` reads."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def has_all(row: Row, options: Options) -> bool:
    """Whether a row has the columns that are asked for. That of a model that does not run has
    nothing more to measure."""
    return row["result"] != "runs" or "trained" in row or not options.train


def parsed() -> argparse.Namespace:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="REGEX", help="in library/name")
    parser.add_argument("--limit", type=int, metavar="N", help="the first N models")
    parser.add_argument("--list", action="store_true", help="print the names")
    parser.add_argument(
        "--install", action="store_true", help="print how to get the libraries"
    )
    parser.add_argument(
        "--train", action="store_true", help="20 steps, plain and in FP8"
    )
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="that a model may take"
    )
    parser.add_argument(
        "--verbose", action="store_true", help="print the casts outside"
    )
    parser.add_argument(
        "--out", type=Path, default=OUT, metavar="FILE", help="rows, one a line"
    )
    return parser.parse_args()


def printed(row: Row, verbose: bool) -> None:
    values = {k: v for k, v in row.items() if k not in ("details", "library")}
    print(
        "  ".join(f"{v}" if k == "name" else f"{k}={v}" for k, v in values.items()),
        flush=True,
    )
    if verbose:
        print(json.dumps(row.get("details", {}), indent=2), flush=True)


def finish(rows: list[Row], given: argparse.Namespace) -> None:
    """Shows the totals, and writes the result if it is of the whole collection."""
    line = summary(rows)
    print(f"\n{line}")
    if not (given.only or given.limit):
        asked = " ".join(QUESTION.split())
        versions = models.versions(rows)
        write("strangers", f"{asked}: {line}; versions: {versions}", by_library(rows))


if __name__ == "__main__":
    main()
