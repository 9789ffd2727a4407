"""Does unit scaling make FP8 training as good as FP32 training, and how bad is FP8 without it?

``python -m benchmarks.training --data FILE`` trains the preset `small` of the nanoGPT demo: five
variants, each at its own learning rate, with three seeds. Run again, it continues in --out.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.common import THREADS, report
from notebooks.nanogpt import cli
from notebooks.nanogpt.session import RESULTS

VARIANTS = ("fp32", "fp8", "fp8_tensor", "unit_scaled", "unit_scaled_fp8")
SEEDS = "0,1,2"
ITERS = 600  # twice the demo's: early in training, seeds differ by more than what is measured
PAIRS = {  # what is compared: variant, reference, what the mean difference may be at most
    "cost of FP8 under unit scaling": ("unit_scaled_fp8", "unit_scaled", 0.02),
    "unit-scaled FP8 against FP32": ("unit_scaled_fp8", "fp32", 0.02),
    "unit-scaled FP32 against FP32": ("unit_scaled", "fp32", None),
    "FP8 with a scale per tensor against FP32": ("fp8_tensor", "fp32", 0.02),
    "FP8 without scales against FP32": ("fp8", "fp32", None),
}


def main() -> int:
    """Trains, prints the rows and records them; 2 for bad input."""
    parser = argparse.ArgumentParser(prog="benchmarks.training", description=__doc__)
    parser.add_argument(
        "--data", help="text to train on (default: the standard library's source)"
    )
    parser.add_argument("--seeds", default=SEEDS)
    parser.add_argument("--out", type=Path, default=Path("out/benchmark-training"))
    args, rest = parser.parse_known_args()
    command = [
        "--preset=small",
        f"--variants={','.join(VARIANTS)}",
        f"--seeds={args.seeds}",
    ]
    command += [f"--iters={ITERS}", f"--threads={THREADS}", "--device=cpu"]
    command += [f"--out={args.out}", "--resume", *rest]
    cli.main([*command, f"--data={args.data}"] if args.data else command)
    results = json.loads((args.out / RESULTS).read_text())
    rows = [*_variant_rows(results), *_pair_rows(results["runs"])]
    iters = results["settings"]["iters"]
    question = (
        f"held-out loss on {results['data']['name']} after {iters} steps of preset small, "
        f"{len(results['seeds'])} seeds"
    )
    report("training", question, rows)
    return 0


def _variant_rows(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Means over the seeds of each variant; gradients lost to e5m2 before and after training."""
    rows = []
    for row in results["summary"]:
        runs = [run for run in results["runs"] if run["variant"] == row["variant"]]
        flushed = {
            f"flushed_{when}": statistics.fmean(
                run["flushed_gradients"][when] for run in runs
            )
            for when in ("start", "end")
        }
        rows.append(
            {
                "name": row["variant"],
                "lr": results["lr"][row["variant"]],
                "train_loss": row["train_loss"],
                "val_loss": row["val_loss"],
                **flushed,
            }
        )
    return [_rounded(row) for row in rows]


def _pair_rows(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Differences of held-out losses with the same seed: mean, standard deviation, each."""
    losses = {(run["variant"], run["seed"]): run["val_loss"] for run in runs}
    seeds = sorted({seed for _, seed in losses})
    rows = []
    for name, (variant, reference, target) in PAIRS.items():
        pairs = [(losses[variant, seed], losses[reference, seed]) for seed in seeds]
        gaps = [math.nan if None in pair else pair[0] - pair[1] for pair in pairs]
        mean = statistics.fmean(gaps)
        row = {
            "name": name,
            "gap": mean,
            "gap_std": statistics.stdev(gaps) if gaps[1:] else None,
        }
        row |= {"gaps": [round(gap, 4) for gap in gaps]}
        if target is not None:
            row |= {"target": target, "met": mean <= target}
        rows.append(_rounded(row))
    return rows


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    return {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}


if __name__ == "__main__":
    sys.exit(main())
