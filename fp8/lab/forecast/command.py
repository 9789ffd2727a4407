"""``fp8 forecast``: the command line of `fp8.forecast`."""

from __future__ import annotations

import argparse

from ..setups import made_by
from .card import CARDS
from .forecast import RECIPES, forecast

ABOUT = "how long a training step takes on a GPU"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``fp8 forecast``."""
    parser.add_argument(
        "setup",
        help="FILE.py:FUNCTION or MODULE:FUNCTION that returns (model, batches[, loss]); the model "
        "may be on the meta device",
    )
    default = " ".join(RECIPES)
    parser.add_argument(
        "--recipes",
        nargs="+",
        default=list(RECIPES),
        metavar="NAME",
        help=f"({default})",
    )
    parser.add_argument(
        "--hardware", default="h100", choices=CARDS, help="(%(default)s)"
    )
    parser.add_argument(
        "--policy",
        metavar="FILE.json",
        help="also write a policy: the fastest recipe, without the layers that it slows down",
    )
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(options: argparse.Namespace) -> tuple[str, int]:
    """The result as text. Raises as `fp8.forecast`, `made_by` and `Forecast.policy`."""
    model, batches, loss, *_ = (*made_by(options.setup), None)
    result = forecast(
        model,
        next(iter(batches)),
        loss=loss,
        recipes=options.recipes,
        hardware=options.hardware,
    )
    if options.policy:
        ours = [variant for variant in result.variants if variant.policy]
        if not ours:
            raise ValueError("--policy needs a recipe of fp8 among --recipes")
        fastest = min(ours, key=lambda variant: variant.seconds)
        result.policy(fastest.recipe).to_json(options.policy)
    return result.to_json() if options.json else str(result), 0
