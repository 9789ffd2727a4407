"""``fp8 parity``: the command line of `fp8.parity`."""

from __future__ import annotations

import argparse
import json
from itertools import islice
from pathlib import Path

from ...recipes.policy import Policy
from ..setups import made_by
from .engines import ENGINES
from .parity import parity

ABOUT = "whether a trainer and an inference engine agree"

# The number of batches of a setup that are prompts.
PROMPTS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``fp8 parity``."""
    policies = f"a recipe, {', '.join(ENGINES)}, none (high precision), or a policy's .json file"
    about = (
        "as for preflight; the model maps ids to logits, prompts are its first "
        f"{PROMPTS} batches"
    )
    parser.add_argument("setup", help=about)
    parser.add_argument("--train", help=f"{policies} (the model as it is)")
    parser.add_argument(
        "--rollout", default="vllm_row", help=f"{policies} (%(default)s)"
    )
    parser.add_argument(
        "--cache",
        help="scaling of the engine's cache in FP8: unit, tensor, vllm, head, token",
    )
    parser.add_argument(
        "--bound", type=float, required=True, help="of KL(rollout || train)"
    )
    parser.add_argument(
        "--total", action="store_true", help="no figures for single layers"
    )
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(options: argparse.Namespace) -> tuple[str, int]:
    """The result as text, and the exit code. Raises as `fp8.parity` and `made_by`."""
    model, batches, *_ = made_by(options.setup)
    prompts = []
    for batch in islice(batches, PROMPTS):
        if isinstance(batch, dict):  # as loaders of transformers yield it
            batch = batch["input_ids"]
        prompts.append(batch)
    result = parity(
        model,
        prompts,
        train=options.train and _policy(options.train),
        rollout=_policy(options.rollout),
        bound=options.bound,
        cache=options.cache,
        by_layer=not options.total,
    )
    text = str(result)
    if options.json:
        text = json.dumps(result.to_dict(), indent=2)
    return text, int(not result.ok)


def _policy(text: str) -> str | Policy:
    """The policy that an argument names."""
    if text == "none":
        return Policy(None)
    if text.endswith(".json"):
        return Policy.from_json(Path(text))
    return text
