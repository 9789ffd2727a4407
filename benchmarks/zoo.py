"""Does `unit_scale` work on models that nobody here wrote?

python -m benchmarks.zoo [NAME ...]

Small configurations of the architectures in the transformers library, with random weights: each is
transformed, measured by `uu.verify`, and trained in FP8. With names or a rule, only prints what it
finds out.
"""

from __future__ import annotations

import argparse
import logging
import math
import warnings
from collections import Counter
from typing import Any

import torch
from torch import nn

import unit_scaling as uu
from benchmarks.architectures import ZOO
from benchmarks.casts import Casts
from benchmarks.common import Row, report
from unit_scaling.parameter import tags_of
from unit_scaling.transforms import simulate_fp8, unit_scale

STEPS = 20
SHARE = 0.97
"""The share of casts in range from which an architecture is verified."""


def build(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """The model of a name, and a batch for it; both random, and the same at every call."""
    import transformers

    entry = ZOO[name]
    cls = getattr(transformers, entry.model)
    torch.manual_seed(0)
    config = cls.config_class(**entry.settings)
    return cls(config), entry.batch()


def examine(name: str, verbose: bool = False) -> Row:
    """Transforms a model, measures it, and trains it in FP8: its row.

    verbose: print its report and its measurements.
    """
    entry = ZOO[name]
    row: Row = {"name": name, "kind": entry.kind}
    try:
        plain, batch = build(name)
    except Exception as error:
        return row | {"result": f"not built: {str(error).splitlines()[0]}"}
    try:
        model = unit_scale(plain)
        passes = _passes(model, batch)
        found = uu.verify(model, batch)
        casts, trained = _casts(simulate_fp8(model), batch)
    except (ValueError, TypeError, NotImplementedError) as error:
        return row | {"result": f"refused: {str(error).splitlines()[0]}"}
    rows = uu.report(model)
    if verbose:
        print(rows, found, *casts.outside(), *trained.outside(), sep="\n\n")
    counts = Counter(each.done for each in rows)
    numbers = [math.log2(tags_of(p).mup_scale) for p in model.parameters()]
    shares = casts.share or 0.0, trained.share or 0.0
    verified = min(shares) >= SHARE
    return {
        **row,
        "scaled": counts["scaled"],
        "kept": len(rows) - counts["scaled"] - counts["left alone"],
        "left_alone": counts["left alone"],
        "lowest": round(min(numbers), 1),
        "highest": round(max(numbers), 1),
        "passes": passes,
        "activations": _rounded(found.share("activation")),
        "weights": _rounded(found.share("weight")),
        "gradients": _rounded(found.share("gradient")),
        "casts": round(shares[0], 3),
        "trained": round(shares[1], 3),
        "result": "verified" if verified else "converted",
    }


def _rounded(share: float) -> float | None:
    return None if math.isnan(share) else round(share, 3)


def _passes(model: nn.Module, batch: dict[str, Any]) -> int:
    """The forward passes of the first call."""
    calls: list[Any] = []
    handle = model.register_forward_pre_hook(lambda *given: calls.append(given))
    model(**batch)
    handle.remove()
    return len(calls)


def _casts(model: nn.Module, batch: dict[str, Any]) -> tuple[Casts, Casts]:
    """The casts of the second step, and of one after training."""
    optimizer = uu.optim.AdamW(model.parameters())

    def step(casts: Casts | None = None) -> None:
        optimizer.zero_grad()
        if casts is None:
            model(**batch).loss.backward()
            return
        with casts.sampled:
            model(**batch).loss.backward()

    second, trained = Casts(model), Casts(model)
    for number in range(STEPS):
        step(second if number == 1 else None)
        optimizer.step()
    step(trained)
    return second, trained


QUESTION = """\
what `unit_scale` makes of architectures of the transformers library, in small configurations with
random weights: parameters that are multiplied, and that keep their values or are zero; calls whose
factor no parameter can hold; log2 of the lowest and highest number that stands beside a parameter
of RMS 1; forward passes of the first call; by `uu.verify` the shares of operands of products and of
gradients that fit in their formats at the scales of their casts: activations, weights, and
gradients but for queries and keys; casts, trained: the share of the casts under `simulate_fp8`
whose SQNR is within 1.5 dB of their format's own, in the second step and after 20 steps of
`uu.optim.AdamW`; verified where these are 0.97 or more"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="of ZOO; all by default"
    )
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    rows = []
    for name in given.names or ZOO:
        rows.append(examine(name, verbose=len(given.names) == 1))
        print(*rows[-1].values(), sep="  ", flush=True)
    if not given.names:
        verified = sum(r["result"] == "verified" for r in rows)
        question = " ".join(QUESTION.split())
        report("zoo", f"{question}: {verified} of {len(rows)}", rows)


if __name__ == "__main__":
    main()
