"""Does the default learning rate of a unit-scaled model suit it at any depth and width?

``python -m benchmarks.sizes`` trains the GPT of `benchmarks.one_line` after ``unit_scale``, at
several depths and widths, under learning rates around the default. Run again, it continues in
--out.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial

import torch

from benchmarks.common import Finished, Row, report
from benchmarks.defaults import RATE, Change
from benchmarks.one_line import HELD_OUT, MODELS, gpt, held_out, mean_loss, parsed
from fp8.lab.preflight.training import Problem

DEPTHS, WIDTHS = (2, 4, 8, 16), (32, 64, 128, 256)
WIDTH_OF_DEPTHS, DEPTH_OF_WIDTHS = 64, 2
SHIFTS = (-1.5, -1.0, -0.5, 0.0, 0.5, 1.0)
"""Of the learning rate from the default, in octaves."""


SIZES = {
    **{f"{n} layers": partial(gpt, n, WIDTH_OF_DEPTHS) for n in DEPTHS},
    **{
        f"width {n}": partial(gpt, DEPTH_OF_WIDTHS, n)
        for n in WIDTHS
        if n != WIDTH_OF_DEPTHS
    },
}
"""Name -> what makes the model; all have a width of 64, or two layers."""


def main() -> int:
    """Trains what is missing, prints the rows and records them."""
    args = parsed("sizes", SIZES, __doc__)
    torch.set_num_threads(1)
    seeds = [int(seed) for seed in args.seeds.split(",")]
    finished, rows = Finished(args.out), list[Row]()
    for size in args.models.split(";"):
        problem = Problem(
            replace(MODELS["GPT"], build=SIZES[size]), args.steps, HELD_OUT
        )
        found = {}
        for shift in SHIFTS:
            about = {"size": size, "shift": shift, "steps": args.steps}
            train = partial(
                held_out, "GPT", problem, Change(lr=2.0**shift).way(), lr=0.0
            )
            found[shift] = mean_loss(finished, about, seeds, train)
            print(f"{size:12} 2^{shift:+.1f} {found[shift]:.4f}", flush=True)
        best = min(found, key=lambda shift: found[shift])
        losses = {f"2^{shift:+.1f}": round(loss, 3) for shift, loss in found.items()}
        rows.append({"name": size, "best": f"2^{best:+.1f}", **losses})
    question = (
        f"held-out loss of a unit-scaled GPT after {args.steps} steps by the learning rate, "
        f"relative to the default of {RATE:g}; mean of seeds {args.seeds}; width "
        f"{WIDTH_OF_DEPTHS}, or {DEPTH_OF_WIDTHS} layers"
    )
    report("sizes", question, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
