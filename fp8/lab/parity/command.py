"""``fp8 parity``: the command line of `fp8.parity`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from ...common.libraries import need
from ...recipes.policy import Policy
from ..setups import made_by
from .parity import ENGINES, parity, read_prompts

ABOUT = "whether a trainer and an inference engine agree"

PROMPTS = 8
"""The number of batches of a setup that are prompts, without a file of prompts."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``fp8 parity``."""
    policies = f"a recipe, {', '.join(ENGINES)}, none (high precision), or a policy's .json file"
    parser.add_argument(
        "setup",
        help="as for preflight; the model maps ids to logits, and may be returned alone",
    )
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help=f"a prompt a line: text, or ids separated by spaces (the first {PROMPTS} batches)",
    )
    parser.add_argument("--tokenizer", metavar="FOLDER", help="of transformers (bytes of the text)")
    parser.add_argument("--train", help=f"{policies} (the model as it is)")
    parser.add_argument("--rollout", default="engine_row", help=f"{policies} (%(default)s)")
    parser.add_argument("--cache", help="scaling of the engine's cache in FP8: tensor, head, token")
    parser.add_argument("--bound", type=float, required=True, help="of KL(rollout || train)")
    parser.add_argument("--total", action="store_true", help="no figures for single layers")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument("--save", metavar="PAGE.html", help="also write a page")


def run(options: argparse.Namespace) -> tuple[str, int]:
    """The result as text, and the exit code. Raises as `fp8.parity` and `made_by`."""
    made = made_by(options.setup)
    model, *batches = made if isinstance(made, tuple | list) else [made]
    result = parity(
        model,
        _prompts(options, batches),
        train=_policy(options.train),
        rollout=_policy(options.rollout),
        bound=options.bound,
        cache=options.cache,
        by_layer=not options.total,
    )
    if options.save:
        result.save(options.save)
    text = json.dumps(result.to_dict(), indent=2) if options.json else str(result)
    return text, int(not result.ok)


def _prompts(options: argparse.Namespace, batches: Sequence[Any]) -> list[Any]:
    """The prompts of the file, or of the batches of a setup."""
    if options.prompts:
        encode = None
        if options.tokenizer:
            encode = need("transformers").AutoTokenizer.from_pretrained(options.tokenizer).encode
        return read_prompts(options.prompts, encode)
    if not batches:
        raise ValueError("the setup returns no batches: give --prompts FILE")
    return [b["input_ids"] if isinstance(b, dict) else b for b in islice(batches[0], PROMPTS)]


def _policy(text: str | None) -> Any:
    """The policy that an argument names."""
    if text == "none":
        return Policy(None)
    return Policy.from_json(Path(text)) if text and text.endswith(".json") else text
