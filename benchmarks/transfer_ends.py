"""Does the best learning rate hold for a deeper model if the ends have a rate of their own?

``python -m benchmarks.transfer_ends --data FILE`` sweeps u-muP by depth with the rate of embedding
and readout four times that of the blocks, and draws docs/umup-ends.png beside what
`benchmarks.transfer` has recorded with one rate for all. Run again, it continues with what is
missing in --out.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, report
from benchmarks.transfer import FIGURE, SEEDS, begin, curves, rows
from notebooks.transfer import ENDS, plot_sweeps

RECORD = RESULTS / "transfer.json"
KIND = "by depth"


def main() -> int:
    """Trains what is missing, prints the rows, records them and draws the figure."""
    runs, about = begin("transfer_ends", __doc__)
    found = curves(runs, ENDS, KIND)
    question = f"and with a higher rate for embedding and readout than for the blocks? {about}"
    report("transfer_ends", question, rows(KIND, found))
    title = f"Learning rates of a transformer on {runs.corpus.name}, mean of {len(SEEDS)} seeds"
    figure = plot_sweeps({KIND: [*recorded(RECORD), *found]}, title=title)
    figure.savefig(FIGURE.with_name("umup-ends.png"))
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
