"""Everything that decides the losses of a run, in one frozen object, and the presets."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from unit_scaling.optim import RATES

from .model import GPTConfig
from .optimizers import OPTIMIZERS


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Shape, data and schedule of a training run. Raises ValueError for values that cannot work.

    `lr` is the peak learning rate of the plain variants and `unit_lr` that of the unit-scaled
    ones, by default that of `uu.optim.AdamW`; both fall to `final_lr` times the peak. `betas`,
    `weight_decay` and `clip` are nanoGPT's.

    The gradients of a unit-scaled model are true ones of weights of RMS 1, so that their norm is
    smaller than the plain model's and `clip` rescales them less often. AdamW's step does not
    change with the scale of the gradients: in `uu.optim` its epsilon is far below theirs.
    """

    tokens: str = "char"
    context: int = 128
    layers: int = 4
    heads: int = 4
    width: int = 128
    dropout: float = 0.0
    batch_size: int = 16
    iters: int = 250
    warmup: int = 50
    lr: float = 4e-3
    unit_lr: float = RATES["adam"]
    final_lr: float = 0.1
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.1
    optimizer: str = "adamw"
    clip: float = 1.0
    eval_interval: int = 50
    eval_batches: int = 10

    def __post_init__(self) -> None:
        self.gpt(vocab=1)  # checks the shape
        if self.optimizer not in OPTIMIZERS:
            choices = ", ".join(OPTIMIZERS)
            raise ValueError(
                f"unknown optimizer {self.optimizer!r}; choose one of {choices}"
            )
        for name in ("batch_size", "iters", "eval_interval", "eval_batches"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name} must be at least 1, got {getattr(self, name)}"
                )
        for name in ("warmup", "lr", "unit_lr", "weight_decay", "clip"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(
                    f"{name} must be finite and not negative, got {getattr(self, name)}"
                )

    def gpt(self, vocab: int) -> GPTConfig:
        """The shape of the model for a vocabulary of `vocab` tokens."""
        names = {field.name for field in dataclasses.fields(GPTConfig)} - {"vocab"}
        return GPTConfig(vocab=vocab, **{name: getattr(self, name) for name in names})

    def as_json(self) -> dict[str, Any]:
        """The settings as JSON returns them (tuples are lists), to compare with a file."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in dataclasses.asdict(self).items()
        }


PRESETS: dict[str, Settings] = {
    # Under a minute a variant on two CPU cores. The learning rates were the best of a sweep, in
    # docs/log.md.
    "small": Settings(),
    # The configuration of the published notebook on unit-scaled FP8 (nanoGPT's
    # train_shakespeare_char); the rates of the unit-scaled model are those of `uu.optim.AdamW`.
    "shakespeare": Settings(
        context=256,
        layers=6,
        heads=6,
        width=384,
        dropout=0.2,
        batch_size=64,
        iters=5000,
        warmup=100,
        lr=1e-3,
        eval_interval=250,
        eval_batches=50,
    ),
}
