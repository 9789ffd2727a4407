"""Does `unit_scale` work on models that nobody here wrote?

python -m benchmarks.zoo [NAME ...]

Small configurations of the architectures in the transformers library, with random weights: each is
transformed, makes one training step, and is measured by `uu.verify`. With names or a rule, only
prints what it finds out.
"""

from __future__ import annotations

import argparse
import logging
import math
import warnings
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import unit_scaling as uu
from benchmarks.architectures import ZOO
from benchmarks.common import Row, report
from benchmarks.strangers.casts import Casts
from unit_scaling.transforms import simulate_fp8, unit_scale


@dataclass
class Result:
    """What became of a model. activations, weights, gradients: the shares of `uu.verify` inside its
    ranges. casts: that of the casts in FP8 whose SQNR is near their format's.

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
    casts: float = math.nan
    residuals: int = 0

    @property
    def verified(self) -> bool:
        """Converted, with 95 % of each kind inside."""
        shares = (self.activations, self.weights, self.gradients, self.casts)
        return self.result == "converted" and all(share >= 0.95 for share in shares)


def build(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """The model of a name, and a batch for it; both random, and the same at every call."""
    import transformers

    entry = ZOO[name]
    cls = getattr(transformers, entry.model)
    torch.manual_seed(0)
    config = cls.config_class(**entry.settings)
    return cls(config), entry.batch()


def examine(name: str, verbose: bool = False) -> Result:
    """Transforms a model, makes one training step with it, and measures it.

    verbose: print its report and its measurements.
    """
    entry = ZOO[name]
    result = Result(name, entry.model, entry.kind, "converted")
    try:
        plain, batch = build(name)
    except Exception as error:
        result.result = f"not built: {str(error).splitlines()[0]}"
        return result
    try:
        model = unit_scale(plain)
        found = uu.verify(model, batch)
        casts = _casts(simulate_fp8(model), batch)
        model(**batch).loss.backward()
        uu.optim.AdamW(model.parameters(), lr=0.01).step()
    except (ValueError, TypeError, NotImplementedError) as error:
        result.result = f"refused: {str(error).splitlines()[0]}"
        return result
    rows = uu.report(model)
    weights = {name for name, _ in model.named_parameters()}
    calls = [row for row in rows if f"{row.path}.{row.call}".lstrip(".") not in weights]
    counts = Counter(row.done for row in calls)
    result.scaled, result.unchanged = counts["scaled"], counts["unchanged"]
    result.left_alone = counts["left alone"]
    result.residuals = sum(row.why.startswith("residual") for row in rows)
    result.activations = found.share("activation")
    result.weights = found.share("weight")
    result.gradients = found.share("gradient")
    result.casts = math.nan if casts.share is None else casts.share
    if verbose:
        print(rows, found, *casts.outside(), sep="\n\n")
    return result


def _casts(model: nn.Module, batch: dict[str, Any]) -> Casts:
    """Those of the second step."""
    model(**batch).loss.backward()
    casts = Casts(model)
    with casts.sampled:
        model(**batch).loss.backward()
    return casts


def row(r: Result) -> Row:
    """The line of a model: "verified" or what became of it."""
    shares = {name: getattr(r, name) for name in ("activations", "weights", "gradients", "casts")}
    return {
        "name": r.name,
        "kind": r.kind,
        "scaled": r.scaled,
        "unchanged": r.unchanged,
        "left_alone": r.left_alone,
        **{n: None if math.isnan(share) else round(share, 3) for n, share in shares.items()},
        "result": "verified" if r.verified else r.result,
    }


QUESTION = """\
what `unit_scale` makes of architectures of the transformers library, in small configurations with
random weights, measured in one training step: calls of torch functions that are scaled by a rule,
in no need of a factor, and left alone by name; by `uu.verify` the shares of what products cast
with an RMS in [1/4, 4], of gradients in [1/4, 64], as cast: activations, weights, and gradients
but for queries and keys; casts: the share of the casts under `simulate_fp8` whose SQNR is within
1.5 dB of their format's own; verified where each is 0.95 or more"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="of ZOO; all by default")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    rows = []
    for name in given.names or ZOO:
        rows.append(row(examine(name, verbose=len(given.names) == 1)))
        print(*rows[-1].values(), sep="  ", flush=True)
    if not given.names:
        verified = sum(r["result"] == "verified" for r in rows)
        question = " ".join(QUESTION.split())
        report("zoo", f"{question}: {verified} of {len(rows)}", rows)


if __name__ == "__main__":
    main()
