"""Does `unit_scale` work on models that nobody here wrote?

python -m benchmarks.zoo [NAME ...] [--residual RULE]

Small configurations of the architectures in the transformers library, with random weights: each is
transformed, makes one training step, and is measured by `uu.verify`. Writes docs/models.md and
benchmarks/results/zoo.json; with names, only prints what it finds out about those models.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import warnings
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import unit_scaling as uu
from benchmarks.architectures import ZOO

ROOT = Path(__file__).parents[1]


@dataclass
class Result:
    """What became of a model. The shares are those of `uu.verify` inside its ranges.

    scaled, unchanged, left_alone: calls, without the model's weights.
    """

    name: str
    model: str
    kind: str
    result: str
    scaled: int = 0
    unchanged: int = 0
    left_alone: int = 0
    activations: float = math.nan
    weights: float = math.nan
    gradients: float = math.nan
    residuals: int = 0

    @property
    def verified(self) -> bool:
        """Converted, with 95 % of each kind inside."""
        shares = (self.activations, self.weights, self.gradients)
        return self.result == "converted" and all(share >= 0.95 for share in shares)


def build(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """The model of a name, and a batch for it; both random, and the same at every call."""
    import transformers

    entry = ZOO[name]
    cls = getattr(transformers, entry.model)
    torch.manual_seed(0)
    config = cls.config_class(**entry.settings)
    return cls(config), entry.batch()


def examine(name: str, verbose: bool = False, **options: Any) -> Result:
    """Transforms a model, makes one training step with it, and measures it.

    verbose: print its report and its measurements. options: of `unit_scale`.
    """
    entry = ZOO[name]
    result = Result(name, entry.model, entry.kind, "converted")
    try:
        plain, batch = build(name)
    except Exception as error:
        result.result = f"not built: {str(error).splitlines()[0]}"
        return result
    try:
        model = uu.transforms.unit_scale(plain, **options)
        found = uu.verify(model, batch)
        loss = model(**batch).loss
        loss.backward()
        uu.optim.AdamW(model.parameters(), lr=0.01).step()
    except (ValueError, TypeError, NotImplementedError) as error:
        result.result = f"refused: {str(error).splitlines()[0]}"
        return result
    report = uu.report(model)
    weights = {name for name, _ in model.named_parameters()}
    calls = [row for row in report if f"{row.path}.{row.call}".lstrip(".") not in weights]
    counts = Counter(row.done for row in calls)
    result.scaled, result.unchanged = counts["scaled"], counts["unchanged"]
    result.left_alone = counts["left alone"]
    result.residuals = sum(row.why.startswith("residual") for row in report)
    result.activations = found.share("activation")
    result.weights = found.share("weight")
    result.gradients = found.share("gradient")
    if verbose:
        print(report, "\n\n", found, sep="")
    return result


def percent(share: float) -> str:
    return "" if math.isnan(share) else f"{100 * share:.0f} %"


def line(r: Result) -> list[str]:
    counts = [str(n) for n in (r.scaled, r.unchanged, r.left_alone)]
    shares = [percent(s) for s in (r.activations, r.weights, r.gradients)]
    result = "verified" if r.verified else r.result
    return [r.name, r.kind, *counts, *shares, result]


HEADER = [
    "model",
    "kind",
    "scaled",
    "unchanged",
    "left alone",
    "activations",
    "weights",
    "gradients",
    "result",
]

PREAMBLE = """\
# Models

Written by `python -m benchmarks.zoo`: architectures of the transformers library in small
configurations with random weights, transformed by `unit_scale` and measured by `uu.verify` in
one training step. Scaled, unchanged and left alone are calls of torch functions: scaled by a
rule, in no need of a factor, and without a rule. Then the shares of tensors whose RMS is in
[1/4, 4]: inputs and outputs of matrix products, convolutions, embeddings and attention; their
weights; the gradients of all these but those of queries and keys. A model is verified if each
share is 95 % or more."""


def write(results: list[Result]) -> None:
    lines = [HEADER, ["---"] * len(HEADER), *map(line, results)]
    table = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
    verified = sum(r.verified for r in results)
    text = f"{PREAMBLE}\n\n{verified} of {len(results)} are verified.\n\n{table}\n"
    (ROOT / "docs" / "models.md").write_text(text)
    rows = [asdict(r) | {"verified": r.verified} for r in results]
    text = json.dumps(rows, indent=1).replace("NaN", "null")
    (ROOT / "benchmarks" / "results" / "zoo.json").write_text(text + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="of ZOO; all by default")
    parser.add_argument("--residual", choices=["fixed", "umup"], help="as in unit_scale")
    given = parser.parse_args()
    options = {"residual": given.residual} if given.residual else {}
    warnings.simplefilter("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    results = []
    for name in given.names or ZOO:
        results.append(examine(name, verbose=len(given.names) == 1, **options))
        print("  ".join(line(results[-1])), flush=True)
    if not (given.names or options):
        write(results)


if __name__ == "__main__":
    main()
