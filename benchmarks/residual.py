"""Which weights of residual branches train better: `unit_scale`'s "fixed" or "umup"?

``python -m benchmarks.residual --data FILE`` trains the preset `small` of the nanoGPT demo with
each rule, at the same learning rate, with three seeds. Run again, it continues in --out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import THREADS, report
from notebooks.nanogpt import cli
from notebooks.nanogpt.session import RESULTS
from notebooks.nanogpt.variants import VARIANTS, Variant
from unit_scaling.transforms import unit_scale

RULES = ("fixed", "umup")
SEEDS = "0,1,2"
ITERS = 600


def main() -> int:
    """Trains, prints the rows and records them; 2 for bad input."""
    parser = argparse.ArgumentParser(prog="benchmarks.residual", description=__doc__)
    parser.add_argument("--data", help="text to train on (default: the standard library's source)")
    parser.add_argument("--seeds", default=SEEDS)
    parser.add_argument("--out", type=Path, default=Path("out/benchmark-residual"))
    args, rest = parser.parse_known_args()
    for rule in RULES:
        build = partial(unit_scale, residual=rule)
        VARIANTS[rule] = Variant(label=f"residual={rule!r}", build=build, unit_scaled=True)
    command = ["--preset=small", f"--variants={','.join(RULES)}", f"--seeds={args.seeds}"]
    command += [f"--iters={ITERS}", f"--threads={THREADS}", "--device=cpu"]
    command += ["--no-umup", "--lr=0.1"]  # torch's AdamW: one rate under both rules
    command += [f"--out={args.out}", "--resume", *rest]
    cli.main([*command, f"--data={args.data}"] if args.data else command)
    results = json.loads((args.out / RESULTS).read_text())
    iters = results["settings"]["iters"]
    question = f"held-out loss on {results['data']['name']} after {iters} steps of preset small"
    report("residual", question, rows(results["runs"]))
    return 0


def rows(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each rule: the loss of each seed, and their mean."""
    found = []
    for rule in RULES:
        losses = {run["seed"]: run["val_loss"] for run in runs if run["variant"] == rule}
        row: dict[str, Any] = {"name": f"residual={rule!r}"}
        row |= {f"seed_{seed}": round(loss, 4) for seed, loss in losses.items()}
        found.append({**row, "mean": round(statistics.fmean(losses.values()), 4)})
    return found


if __name__ == "__main__":
    sys.exit(main())
