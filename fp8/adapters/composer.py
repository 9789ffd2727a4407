"""Composer's LowPrecisionLayerNorm algorithm, implemented with `fp8.apply_low_precision_layernorm`.

    from fp8.adapters.composer import LowPrecisionLayerNorm
    trainer = Trainer(model=model, algorithms=[LowPrecisionLayerNorm()], precision="amp_bf16", ...)

The tests do not run it in the Trainer: Composer requires an older torch.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

from ..common.libraries import need
from ..training.low_precision_norms import apply_low_precision_layernorm

__all__ = ["LowPrecisionLayerNorm"]

# composer.core.Algorithm and State, which may not be installed.
Algorithm = Any
State = Any


def LowPrecisionLayerNorm(apply_at: Enum | None = None) -> Algorithm:
    """An Algorithm of Composer that applies `fp8.apply_low_precision_layernorm` to the Trainer's
    model, with the Trainer's precision.

    Args:
        apply_at: Composer's event: INIT, BEFORE_LOAD or AFTER_LOAD. None: INIT.

    Raises:
        ValueError: for another event.
        ImportError: if Composer is not installed.
    """
    core = need("composer").core
    events = (core.Event.INIT, core.Event.BEFORE_LOAD, core.Event.AFTER_LOAD)
    at = apply_at or events[0]
    if at not in events:
        allowed = ", ".join(map(str, events))
        raise ValueError(f"apply_at must be one of {allowed}, got {at!r}")

    class LowPrecisionLayerNorm(core.Algorithm):  # type: ignore[name-defined]
        def __repr__(self) -> str:
            return f"LowPrecisionLayerNorm(apply_at={at})"

        @staticmethod
        def required_on_load() -> bool:
            """Checkpoints load without it: the model has the parameters of the plain model."""
            return False

        def match(self, event: Enum, state: State) -> bool:
            return event == at

        def apply(self, event: Enum, state: State, logger: object) -> None:
            apply_low_precision_layernorm(
                state.model, state.precision, state.optimizers
            )

    return LowPrecisionLayerNorm()
