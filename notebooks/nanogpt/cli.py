"""The command line: ``python -m notebooks.nanogpt``. Bad input: one line on stderr, exit code 2."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from .data import TOKENS, load_corpus
from .optimizers import OPTIMIZERS
from .results import summary, table
from .session import PLOT, RESULTS, Session, prepare, run
from .settings import PRESETS, Settings
from .variants import DEMO, VARIANTS, by_default

EXIT_BAD_INPUT = 2


class _Parser(argparse.ArgumentParser):
    """argparse with errors of one line: the usage is what --help is for."""

    def error(self, message: str) -> NoReturn:
        line = " ".join(message.split())
        self.exit(EXIT_BAD_INPUT, f"{self.prog}: error: {line}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Trains and prints the table; 0. Raises SystemExit(2) for bad input."""
    parser = _build_parser()
    args = parser.parse_args(argv)
    try:
        session = _session(args)
        finished = prepare(session, resume=args.resume)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    _show(session, run(session, finished))
    return 0


def _show(session: Session, runs: list[dict[str, Any]]) -> None:
    print(
        f"\n{VARIANTS[runs[-1]['variant']].label} continues {runs[-1]['sample'][:1]!r}:\n"
    )
    print(runs[-1]["sample"])
    print(f"\n{table(summary(runs))}\n")
    print(f"results  {session.out / RESULTS}")
    print(f"plot     {session.out / PLOT}")


OPTIONS: dict[str, dict[str, Any]] = {
    "--data": {
        "metavar": "FILE",
        "help": "text (default: the Python standard library's source)",
    },
    "--preset": {
        "default": "small",
        "help": f"{' or '.join(PRESETS)} (default: %(default)s)",
    },
    "--variants": {
        "help": f"some of {','.join(VARIANTS)} (default: {','.join(DEMO)}; bf16 only on "
        "devices with bfloat16 products)",
    },
    "--seeds": {
        "default": "0",
        "help": "whole numbers and commas (default: %(default)s)",
    },
    "--lr": {
        "help": "peak learning rate: a number for all, or variant=number,... for some"
    },
    "--out": {
        "type": Path,
        "help": "folder for the results (default: out/PRESET, or the next free number)",
    },
    "--resume": {
        "action": "store_true",
        "help": "continue the run in --out, or start it there if there is none",
    },
    "--compile": {
        "action": argparse.BooleanOptionalAction,
        "default": False,
        "help": "torch.compile the models (default: no)",
    },
    "--device": {
        "default": "auto",
        "help": "auto, cpu, cuda or cuda:N (default: %(default)s)",
    },
    "--threads": {
        "type": int,
        "default": torch.get_num_threads(),
        "help": "CPU threads (default: %(default)s)",
    },
    "--sample": {
        "type": int,
        "default": 160,
        "help": "tokens to sample (default: %(default)s)",
    },
}
CHOICES = {"tokens": TOKENS, "optimizer": tuple(OPTIMIZERS)}
# Settings without an option of their own; --lr sets both.
PRESET_GIVES = {
    "lr",
    "unit_lr",
    "betas",
}


def _build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="nanogpt",
        description="Train a small GPT on any text in FP32, BF16, simulated FP8 without scales and "
        "with one per tensor, unit-scaled, and unit-scaled simulated FP8; compare the losses.",
        allow_abbrev=False,
    )
    for option, how in OPTIONS.items():
        parser.add_argument(option, **how)
    overrides = parser.add_argument_group("settings of the preset")
    for field in dataclasses.fields(Settings):
        if field.name not in PRESET_GIVES:
            _add_override(overrides, field.name, getattr(PRESETS["small"], field.name))
    return parser


def _add_override(group: argparse._ArgumentGroup, name: str, example: object) -> None:
    option = "--" + name.replace("_", "-")
    if isinstance(example, bool):
        group.add_argument(option, action=argparse.BooleanOptionalAction)
    elif name in CHOICES:
        group.add_argument(option, choices=CHOICES[name])
    else:
        group.add_argument(option, type=type(example), metavar="N")


def _session(args: argparse.Namespace) -> Session:
    settings = _settings(args)
    device = _device(args.device)
    variants = _variants(args.variants, device)
    if args.threads < 1:
        raise ValueError(f"--threads must be at least 1, got {args.threads}")
    if args.sample < 0:
        raise ValueError(f"--sample must not be negative, got {args.sample}")
    if args.resume and args.out is None:
        raise ValueError("--resume needs --out: the folder of the run to continue")
    return Session(
        corpus=load_corpus(args.data, tokens=settings.tokens, context=settings.context),
        settings=settings,
        lr=_learning_rates(args.lr, variants, settings),
        seeds=_seeds(args.seeds),
        out=args.out or _fresh_folder(args.preset),
        device=device,
        threads=args.threads,
        compile=args.compile,
        sample=args.sample,
    )


def _settings(args: argparse.Namespace) -> Settings:
    """The preset with the options given in place of its own."""
    if args.preset not in PRESETS:
        raise ValueError(
            f"unknown preset {args.preset!r}; choose one of {', '.join(PRESETS)}"
        )
    names = [
        field.name
        for field in dataclasses.fields(Settings)
        if field.name not in PRESET_GIVES
    ]
    given = {
        name: getattr(args, name) for name in names if getattr(args, name) is not None
    }
    return dataclasses.replace(PRESETS[args.preset], **given)


def _variants(text: str | None, device: torch.device) -> list[str]:
    """The variants asked for or, without any, those that the device does not emulate."""
    if text is not None:
        return _names(text)
    variants = by_default(device)
    for name in DEMO:
        if name not in variants:
            print(
                f"{VARIANTS[name].label} is left out: this CPU has no bfloat16 products and "
                f"emulates them slowly; --variants {','.join(DEMO)} includes it"
            )
    return list(variants)


def _names(text: str) -> list[str]:
    """Variant names in the order given, each once."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in VARIANTS:
            raise ValueError(
                f"unknown variant {name!r}; choose from {', '.join(VARIANTS)}"
            )
    return list(dict.fromkeys(names))


def _seeds(text: str) -> tuple[int, ...]:
    try:
        seeds = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise ValueError(
            f"--seeds must be whole numbers separated by commas, got {text!r}"
        ) from None
    if not all(0 <= seed < 2**63 for seed in seeds):  # what torch.manual_seed takes
        raise ValueError(f"--seeds must be from 0 to 2**63 - 1, got {text!r}")
    return seeds


def _learning_rates(
    text: str | None, variants: Sequence[str], settings: Settings
) -> dict[str, float]:
    """The peak of each variant: its preset's, unless `text` gives one for it or for all."""
    rates = {name: VARIANTS[name].default_lr(settings) for name in variants}
    if text is None:
        return rates
    pairs = [part.rpartition("=") for part in text.split(",")]
    if len(pairs) > 1 and not all(name for name, _, _ in pairs):
        raise ValueError(f"--lr must be a number or variant=number,..., got {text!r}")
    for name, _, value in pairs:
        if name and name not in rates:
            raise ValueError(
                f"--lr names {name!r}, which is not among --variants {','.join(variants)}"
            )
        for variant in [name] if name else variants:
            rates[variant] = _rate(value)
    return rates


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = -1.0
    if not 0 <= rate < float("inf"):
        raise ValueError(f"--lr must be finite and not negative, got {text!r}")
    return rate


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(
            f"unknown device {name!r}; choose auto, cpu, cuda or cuda:N"
        ) from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(
            f"unsupported device {name!r}; choose auto, cpu, cuda or cuda:N"
        )
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError("no CUDA device here; choose --device cpu")
        # cuBLAS reads this when it starts, and is deterministic only with it.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return device


def _fresh_folder(preset: str) -> Path:
    """out/PRESET, or out/PRESET-2, -3, ...: the first that does not exist."""
    names = itertools.chain([preset], (f"{preset}-{i}" for i in itertools.count(2)))
    return next(path for name in names if not (path := Path("out") / name).exists())
