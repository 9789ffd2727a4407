"""Composer's LowPrecisionLayerNorm algorithm, implemented with `fp8.apply_low_precision_layernorm`.

    from fp8.adapters.composer import LowPrecisionLayerNorm
    trainer = Trainer(model=model, algorithms=[LowPrecisionLayerNorm()], precision="amp_bf16", ...)

The class is created on first access, as it derives from Composer's Algorithm. The tests do not run
it in the Trainer: Composer requires an older torch.
"""

from __future__ import annotations

import functools
from typing import Any

from ..common.libraries import need
from ..norms.low_precision import apply_low_precision_layernorm

__all__: list[str] = []


def __getattr__(name: str) -> Any:
    if name != "LowPrecisionLayerNorm":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _algorithm()


@functools.cache
def _algorithm() -> type[Any]:
    core = need("composer").core

    class LowPrecisionLayerNorm(core.Algorithm):  # type: ignore[name-defined]
        """Applies `fp8.apply_low_precision_layernorm` to the Trainer's model, with the Trainer's
        precision.

        Args:
            apply_at: Composer's event: INIT, BEFORE_LOAD or AFTER_LOAD.

        Raises:
            ValueError: for another event.
            ImportError: if Composer is not installed.
        """

        def __init__(self, apply_at: Any = core.Event.INIT) -> None:
            events = (core.Event.INIT, core.Event.BEFORE_LOAD, core.Event.AFTER_LOAD)
            if apply_at not in events:
                allowed = ", ".join(map(str, events))
                raise ValueError(f"apply_at must be one of {allowed}, got {apply_at!r}")
            self.apply_at = apply_at

        def __repr__(self) -> str:
            return f"{type(self).__name__}(apply_at={self.apply_at})"

        @staticmethod
        def required_on_load() -> bool:
            """Checkpoints load without it: the parameters are those of the plain model."""
            return False

        def match(self, event: Any, state: Any) -> bool:
            return bool(event == self.apply_at)

        def apply(self, event: Any, state: Any, logger: Any) -> None:
            apply_low_precision_layernorm(state.model, state.precision, state.optimizers)

    LowPrecisionLayerNorm.__qualname__ = "LowPrecisionLayerNorm"  # for pickle
    return LowPrecisionLayerNorm
