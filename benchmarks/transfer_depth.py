"""Does the best learning rate of a small model hold for a deeper one under other rules for depth?

``python -m benchmarks.transfer_depth --data FILE`` sweeps two variants of u-muP by depth and draws
docs/umup-depth.png, beside what `benchmarks.transfer` has recorded of u-muP as it is. Run again, it
continues with what is missing in --out.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, report
from benchmarks.transfer import FIGURE, SEEDS, begin, curves, rows
from notebooks.transfer import COMPLETE, ENDS, plot_sweeps

RECORD = RESULTS / "transfer.json"
KIND = "by depth"


def main() -> int:
    """Trains what is missing, prints the rows, records them and draws the figure."""
    runs, about = begin("transfer_depth", __doc__)
    found = [curve for name in (COMPLETE, ENDS) for curve in curves(runs, name, KIND)]
    question = f"how far does the best learning rate move with depth under other rules? {about}"
    report("transfer_depth", question, rows(KIND, found))
    title = f"Learning rates of a transformer on {runs.corpus.name}, mean of {len(SEEDS)} seeds"
    figure = plot_sweeps({KIND: [*recorded(RECORD), *found]}, title=title)
    figure.savefig(FIGURE.with_name("umup-depth.png"))
    return 0


def recorded(path: Path) -> list[dict[str, Any]]:
    """The curves of u-muP by depth in the record of `benchmarks.transfer`: means, no seeds."""
    return [
        {
            "parametrisation": "u-muP",
            "label": f"{row['layers']} layers",
            "losses": {int(rate[2:]): [loss] for rate, loss in row["losses"].items()},
        }
        for row in json.loads(path.read_text())["rows"]
        if row["name"] == f"u-muP {KIND}"
    ]


if __name__ == "__main__":
    sys.exit(main())
