"""`python -m benchmarks [NAME ...]`: run the named benchmarks, or all of them, each in its own
process."""

from __future__ import annotations

import subprocess
import sys

BENCHMARKS = (
    "quantize",
    "ops",
    "rows",
    "recipes",
    "stats",
    "optim",
    "optimizers",
    "optimizer_loss",
    "half_precision",
    "transforms",
    "training",
    "one_line",
    "demo_rates",
    "levels",
    "transfer",
    "transfer_depth",
    "defaults",
    "sizes",
    "first_call",
    "cast_bias",
    "recipe_loss",
    "fine_tuning",
    "sums",
    "router",
    "preflight",
    "papers",
    "zoo",
    "strangers",
    "norms",
    "faults",
    "forecast",
)
"""Scripts of this package; `python -m benchmarks.NAME` runs one and writes results/NAME.json."""


def main(names: list[str]) -> int:
    """Run the benchmarks and return the number that failed; 2 for an unknown name."""
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        print(
            f"unknown benchmark {unknown[0]!r}; choose from {', '.join(BENCHMARKS)}",
            file=sys.stderr,
        )
        return 2
    commands = [
        [sys.executable, "-m", f"benchmarks.{name}"] for name in names or BENCHMARKS
    ]
    return sum(subprocess.run(command).returncode != 0 for command in commands)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
