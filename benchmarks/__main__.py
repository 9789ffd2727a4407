"""`python -m benchmarks [NAME ...]`: run the named benchmarks, or all of them, each in its own
process."""

from __future__ import annotations

import subprocess
import sys

BENCHMARKS = {
    **dict.fromkeys(("recipes", "transforms", "stats"), "steps"),
    **{
        name: name
        for name in (
            "optimizers",
            "training",
            "one_line",
            "demo_rates",
            "transfer",
            "defaults",
            "sizes",
            "cast_bias",
            "recipe_loss",
            "sums",
            "preflight",
            "zoo",
            "strangers",
            "faults",
            "forecast",
        )
    },
}
"""Name of the results -> script of this package. One that has several results takes the name as an
argument: `python -m benchmarks.steps recipes`."""


def command(name: str) -> list[str]:
    """The command that measures what results/NAME.json has."""
    script = BENCHMARKS[name]
    arguments = [] if script == name else [name]
    return [sys.executable, "-m", f"benchmarks.{script}", *arguments]


def main(names: list[str]) -> int:
    """Run the benchmarks and return the number that failed; 2 for an unknown name."""
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        print(
            f"unknown benchmark {unknown[0]!r}; choose from {', '.join(BENCHMARKS)}",
            file=sys.stderr,
        )
        return 2
    commands = [command(name) for name in names or BENCHMARKS]
    return sum(subprocess.run(each).returncode != 0 for each in commands)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
