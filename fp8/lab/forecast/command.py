"""``fp8 forecast``: the command line of `fp8.forecast`."""

from __future__ import annotations

import argparse
import sys
import time

from ..hardware import BF16
from ..setups import made_by
from .card import CARDS
from .forecast import RECIPES, REPLAYS, forecast
from .result import Variant

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
        "--cuda-graphs",
        action="store_true",
        help='as under torch.compile(mode="reduce-overhead"): no time for launches',
    )
    parser.add_argument(
        "--policy",
        metavar="FILE.json",
        help="also write a policy: the fastest recipe, without the layers that it slows down",
    )
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(options: argparse.Namespace) -> tuple[str, int]:
    """The result as text; each recipe is a line on stderr when it is known. Raises as
    `fp8.forecast`, `made_by` and `Forecast.policy`."""
    progress = _Progress((BF16, *options.recipes), options.hardware)
    model, batches, loss, *_ = (*made_by(options.setup), None)
    settings = {"mode": REPLAYS} if options.cuda_graphs else {}
    result = forecast(
        model,
        next(iter(batches)),
        loss=loss,
        recipes=options.recipes,
        hardware=options.hardware,
        options=settings,
        progress=progress,
    )
    if options.policy:
        ours = [variant for variant in result.variants if variant.policy]
        if not ours:
            raise ValueError("--policy needs a recipe of fp8 among --recipes")
        fastest = min(ours, key=lambda variant: variant.seconds)
        result.policy(fastest.recipe).to_json(options.policy)
    return result.to_json() if options.json else str(result), 0


class _Progress:
    """Lines on stderr: what is compiled, then each variant as it comes."""

    def __init__(self, recipes: tuple[str, ...], hardware: str) -> None:
        self._begin, self._bf16 = time.monotonic(), 0.0
        self._say(f"compiling for {hardware}: {', '.join(recipes)}")

    def __call__(self, variant: Variant) -> None:
        self._bf16 = self._bf16 or variant.seconds
        after = time.monotonic() - self._begin
        self._say(
            f"{variant.recipe}: {1e3 * variant.seconds:.3g} ms, "
            f"{variant.seconds / self._bf16:.3f} of bf16, bound by {variant.bound} "
            f"({after:.0f} s)"
        )

    @staticmethod
    def _say(text: str) -> None:
        print(f"fp8 forecast: {text}", file=sys.stderr, flush=True)
