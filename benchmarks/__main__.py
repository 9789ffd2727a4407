"""`python -m benchmarks [NAME ...]`: run the named benchmarks, or all but `LONG`, each in its own
process. The demo (`make record`), `gpu` (`make gpu`) and `codebases` have commands of their own."""

from __future__ import annotations

import subprocess
import sys

OF_ONE_RESULT = (
    "optimizers training one_line transfer cast_bias recipe_loss sums preflight zoo strangers "
    "faults forecast"
).split()

LONG = "recipe_loss_large"
"""A run of it takes about 20 times as long as one of recipe_loss."""

BENCHMARKS = {
    **{name: name for name in OF_ONE_RESULT},
    LONG: "recipe_loss --large",
    "transfer_depth": "transfer",
    **{name: f"rates {name}" for name in ("defaults", "sizes")},
    **{name: f"steps {name}" for name in ("recipes", "transforms", "stats")},
}
"""Name of the results -> script of this package, and its arguments."""


def main(names: list[str]) -> int:
    """Run the benchmarks and return the number that failed; 2 for an unknown name."""
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        known = ", ".join(BENCHMARKS)
        print(f"unknown benchmark {unknown[0]!r}; choose from {known}", file=sys.stderr)
        return 2
    names = names or [name for name in BENCHMARKS if name != LONG]
    commands = dict.fromkeys(BENCHMARKS[name] for name in names)
    python = [sys.executable, "-m"]
    finished = [
        subprocess.run([*python, *f"benchmarks.{each}".split()]) for each in commands
    ]
    return sum(run.returncode != 0 for run in finished)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
