"""``fp8 parity``: the command line of `fp8.parity` and of `certify`."""

from __future__ import annotations

import argparse
import json
from itertools import islice
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ...adapters.transformers import KV_SCALINGS
from ...recipes.policy import Policy
from ...recipes.tensor_cores import EXACT, SUMS
from ..setups import made_by
from .certify import certify
from .engines import ENGINES
from .parity import parity

ABOUT = "whether a trainer and an inference engine agree"

# The number of batches of a setup that are prompts.
PROMPTS = 8

NO_SUMS = "torch"
"""``--sums`` for those of torch."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``fp8 parity``."""
    commands = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    compared = commands.add_parser(
        "compare", help="how far the distributions of two policies are apart"
    )
    certified = commands.add_parser(
        "certify", help="whether the engine with the trainer's weights equals it"
    )
    policies = f"a recipe, {', '.join(ENGINES)}, none (high precision), or a policy's .json file"
    about = (
        "as for preflight; the model maps ids to logits, prompts are its first "
        f"{PROMPTS} batches. fp8.lab.parity.families:llama and others are there to try"
    )
    for command in (compared, certified):
        command.add_argument("setup", help=about)
        command.add_argument(
            "--cache",
            help=f"scaling of the engine's cache in FP8: {', '.join(KV_SCALINGS)}",
        )
        _add_devices(command)
        command.add_argument("--json", action="store_true", help="as JSON")
    compared.add_argument("--train", help=f"{policies} (the model as it is)")
    compared.add_argument(
        "--rollout", default="vllm_row", help=f"{policies} (%(default)s)"
    )
    compared.add_argument(
        "--bound", type=float, required=True, help="of KL(rollout || train)"
    )
    compared.add_argument(
        "--total", action="store_true", help="no figures for single layers"
    )
    certified.add_argument("--train", help=f"{policies} (the engine's recipe)")
    certified.add_argument(
        "--engine", default="vllm_row", help=f"{', '.join(ENGINES)} (%(default)s)"
    )
    certified.add_argument("--page", help="an HTML file to write the certificate to")
    for command, default in ((compared, NO_SUMS), (certified, EXACT)):
        command.add_argument(
            "--sums",
            default=default,
            help=f"of both: {', '.join(SUMS)}, {NO_SUMS} (%(default)s)",
        )


def _add_devices(command: argparse.ArgumentParser) -> None:
    for option, whose in (("--devices", "engine"), ("--train-devices", "trainer")):
        about = (
            f"that share the model of the {whose} by tensor parallelism (%(default)s)"
        )
        command.add_argument(option, type=int, default=1, help=about)
    command.add_argument(
        "--split",
        nargs="+",
        metavar="PATTERN",
        help="names of layers whose inputs devices split (those of the model's tp_plan)",
    )


def run(options: argparse.Namespace) -> tuple[str, int]:
    """The result as text, and the exit code. Raises as `fp8.parity`, `certify` and `made_by`."""
    model, prompts = _prompts(options.setup)
    common: dict[str, Any] = {
        "train": options.train and _policy(options.train),
        "sums": None if options.sums == NO_SUMS else options.sums,
        "cache": options.cache,
        "devices": options.devices,
        "train_devices": options.train_devices,
        "split": options.split,
    }
    result: Any
    if options.action == "certify":
        result = certify(model, prompts, engine=options.engine, **common)
        if options.page:
            Path(options.page).write_text(result.page(), encoding="utf-8")
    else:
        result = parity(
            model,
            prompts,
            rollout=_policy(options.rollout),
            bound=options.bound,
            by_layer=not options.total,
            **common,
        )
    text = str(result)
    if options.json:
        text = json.dumps(result.to_dict(), indent=2)
    return text, int(not result.ok)


def _prompts(setup: str) -> tuple[nn.Module, list[Tensor]]:
    """The model of a setup, and its first batches as prompts."""
    model, batches, *_ = made_by(setup)
    prompts = []
    for batch in islice(batches, PROMPTS):
        if isinstance(batch, dict):  # as loaders of transformers yield it
            batch = batch["input_ids"]
        prompts.append(batch)
    return model, prompts


def _policy(text: str) -> str | Policy:
    """The policy that an argument names."""
    if text == "none":
        return Policy(None)
    if text.endswith(".json"):
        return Policy.from_json(Path(text))
    return text
