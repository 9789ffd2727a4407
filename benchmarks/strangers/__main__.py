"""What `unit_scale`, `simulate_fp8` and `uu.verify` make of models of other libraries.

python -m benchmarks.strangers [--only REGEX] [--limit N] [--train] [--compiled] [--out FILE]
                               [--reduced]

Small configurations with random weights. Each model is built, transformed and measured in a process
of its own. Without --only and --limit the result is written to benchmarks/results. Run again, it
continues with the models whose rows in --out lack what is asked for. --reduced takes, instead of
the collection, every architecture of transformers (`reduced`).
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

from . import collection, reduced
from .case import Stranger
from .examine import Options, described, examine

SECONDS = 60.0
"""What a model may take, of the processor's time."""

STATIC = 0.99
"""The share of operands that recipe "static" should cast near RMS 1."""

PATIENCE = 5
"""How many seconds of the clock to wait for one of the processor, on a machine with other work."""

COMPILED = 1e-6
"""The error up to which a compiled model equals the eager one, in float64."""

OUT = Path("out/benchmark-strangers.jsonl")

MODELS = "models of other libraries, in small configurations with random weights"

REDUCED = """\
every architecture of transformers whose sizes one rule makes small, with random weights; those of
which no model was built so (many are parts of others) are not in the table\
"""

QUESTION = """\
what `unit_scale`, `simulate_fp8` and `uu.verify` make of {models}. Measured are the operands of
every matrix product and convolution that ATen runs in one training step, forward and backward: the
share of activations, weights and gradients with an RMS in [1/4, 4], of the plain model and of the
unit-scaled one (outputs of softmaxes and operands of zeros aside; the factor of a convolution rides
in its weight), and the activation or gradient farthest from 1; inside: 95 % of activations and of
gradients are; verify: the shares of `uu.verify`; agrees: it judges alike; cast, unit cast: of the
products, those with every operand on the grid of its format, under `simulate_fp8` of the plain
model and of the unit-scaled one; preserve: the error of the outputs with init="preserve"\
"""

TRAINED = """\
fp32 fall, fp8 fall: the last loss of 20 steps over the first, of the plain model with AdamW and of
the unit-scaled one in FP8 with `uu.optim.AdamW`, at one learning rate for all models; compiled: the
largest error of outputs and gradients of the unit-scaled model in float64 under torch.compile with
the random numbers of eager mode, relative to the largest value of the tensor; gradients that are
zero but for rounding aside; where the plain model has such an error itself, the row does not count\
"""


def measured(stranger: Stranger, options: Options, seconds: float) -> Row:
    """The row of a model, as far as it was made before an error, a crash or the end of the time."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(stranger, options, sender, seconds))
    start = time.monotonic()
    process.start()
    sender.close()
    row: Row = {"name": stranger.name, "library": stranger.package, "result": "not built"}
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
        done = row["result"] if row["result"] not in ("not built", "not finished") else "failed"
        row["result"] = f"{done}: {ended}" if done == "failed" else done
        row["ended"] = ended
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
    last: Row = {"name": stranger.name, "library": stranger.package, "result": "not built"}

    def send(row: Row) -> None:
        last.update(row)
        sender.send(dict(row))

    try:
        examine(stranger, options, send)
    except Exception as error:
        last["result"] = f"{last['result']}: {described(error)}"
    last["seconds"] = round(sum(resource.getrusage(resource.RUSAGE_SELF)[:2]) - used, 1)
    sender.send({**last, "finished": True})
    os._exit(0)


def summary(rows: list[Row]) -> str:
    """The totals in one line."""
    kinds = Counter(row["result"].partition(":")[0].partition(" in ")[0] for row in rows)
    runs = [row for row in rows if row["result"] == "runs"]
    full = [row for row in runs if not row["details"]["zeros"]]
    parts = [f"{len(rows)} models: {', '.join(f'{n} {kind}' for kind, n in kinds.items())}"]
    for name, chosen in (("", runs), (" without zeros", full)):
        inside = sum(row["inside"] for row in chosen)
        parts.append(f"inside{name} {inside} of {len(chosen)}")
    parts.append(f"verify agrees on {sum(row.get('agrees', False) for row in runs)} of {len(runs)}")
    for key in ("cast", "unit_cast"):
        counts = [row[key].split("/") for row in rows if "/" in str(row.get(key, "")).split(":")[0]]
        parts.append(f"{key} whole {sum(a == b for a, b in counts)} of {len(counts)}")
    shares = [row["static"] for row in rows if isinstance(row.get("static"), float)]
    parts.append(f"static {sum(s >= STATIC for s in shares)} of {len(shares)} at {STATIC:.0%}")
    parts += [*_falls(runs), *_compiled(rows)]
    exact = sum(row.get("preserve") == "exact" for row in rows)
    parts.append(f"preserve exact {exact}")
    return "; ".join(parts)


def _falls(rows: list[Row]) -> list[str]:
    pairs = [(row["fp32_fall"], row.get("fp8_fall")) for row in rows if "fp32_fall" in row]
    if not pairs:
        return []
    fp32, fp8 = (
        sum(isinstance(fall, float) and fall < 1 for fall in falls)
        for falls in zip(*pairs, strict=True)
    )
    return [f"losses that fall: FP32 {fp32}, unit-scaled FP8 {fp8} of {len(pairs)}"]


def _compiled(rows: list[Row]) -> list[str]:
    plain = [row for row in rows if "compiled" in row and _equal(row["details"]["compiled_plain"])]
    if not any("compiled" in row for row in rows):
        return []
    equal = sum(_equal(row["compiled"]) for row in plain)
    others = sum("compiled" in row for row in rows) - len(plain)
    aside = f" ({others} aside that differ when they are plain)" if others else ""
    return [f"compiled within {COMPILED:g}: {equal} of {len(plain)}{aside}"]


def _equal(error: str) -> bool:
    return not error.startswith("failed") and float(error) <= COMPILED


def main() -> None:
    given = parsed()
    if given.install:
        print("pip install --no-deps", *collection.requirements())
        return
    torch.set_num_threads(1)
    collection.prepare()
    whole = reduced.strangers() if given.reduced else collection.STRANGERS
    found = [s for s in whole if re.search(given.only, f"{s.package}/{s.name}")]
    found = found[: given.limit]
    rows, done = [], recorded(given.out)
    for i, stranger in enumerate(found):
        if given.list:
            print(f"{stranger.package}/{stranger.name}")
            continue
        why = collection.missing(stranger.package)
        if why:
            print(f"{stranger.package}/{stranger.name}: skipped, {why}", flush=True)
            continue
        compiled = i * given.compiled // len(found) < (i + 1) * given.compiled // len(found)
        options = Options(given.train, compiled)
        row = done.get(f"{stranger.package}/{stranger.name}")
        if row is None or not has_all(row, options):
            collection.preload(stranger.package)
            row = measured(stranger, options, given.seconds * (10 if compiled else 1))
            record(row, given.out)
            printed(row, given.verbose)
        rows.append(row)
    if rows:
        finish(rows, given)


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
    asked = {"fp32_fall": options.train, "compiled": options.compiled}
    return row["result"] != "runs" or all(key in row for key, on in asked.items() if on)


def parsed() -> argparse.Namespace:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="REGEX", help="in library/name")
    parser.add_argument("--limit", type=int, metavar="N", help="the first N models")
    parser.add_argument("--list", action="store_true", help="print the names")
    parser.add_argument(
        "--reduced", action="store_true", help="every architecture of transformers instead"
    )
    parser.add_argument("--install", action="store_true", help="print how to get the libraries")
    parser.add_argument("--train", action="store_true", help="20 steps, FP32 and unit-scaled FP8")
    parser.add_argument(
        "--compiled",
        type=int,
        nargs="?",
        const=30,
        default=0,
        metavar="N",
        help="compare N models, evenly chosen, with torch.compile of them; 30 by default",
    )
    parser.add_argument("--seconds", type=float, default=SECONDS, help="that a model may take")
    parser.add_argument("--verbose", action="store_true", help="print the five worst operands")
    parser.add_argument("--out", type=Path, default=OUT, metavar="FILE", help="rows, one a line")
    return parser.parse_args()


def printed(row: Row, verbose: bool) -> None:
    values = {k: v for k, v in row.items() if k not in ("details", "library")}
    print("  ".join(f"{v}" if k == "name" else f"{k}={v}" for k, v in values.items()), flush=True)
    if verbose:
        print(json.dumps(row.get("details", {}), indent=2), flush=True)


def finish(rows: list[Row], given: argparse.Namespace) -> None:
    """Writes the result, or shows it if it is of a part of the collection. Of --reduced, the models
    that could not be built are not in it."""
    built = [row for row in rows if not row["result"].startswith("not built")]
    if given.reduced:
        line = f"{summary(built)}; {len(rows) - len(built)} architectures were not built"
        name, asked, rows = "strangers_reduced", QUESTION.format(models=REDUCED), built
    else:
        line = summary(rows)
        name, asked = "strangers", f"{QUESTION.format(models=MODELS)}; {TRAINED}"
    question = f"{' '.join(asked.split())}: {line}; versions: {collection.versions(rows)}"
    print(f"\n{line}")
    if not (given.only or given.limit):
        write(name, question, rows)


if __name__ == "__main__":
    main()
