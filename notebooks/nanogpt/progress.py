"""What a training run shows while it runs."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any


class Progress:
    """A bar with loss and tokens/s on a terminal; elsewhere one line at each evaluation.

    A context manager. Writes to stderr, so that stdout holds results only.
    """

    def __init__(self, name: str, *, total: int) -> None:
        self._name = name
        self._bar: Any = None
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(desc=name, total=total, unit="it", dynamic_ncols=True)
        self._total = total

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def advance(self, steps: int, *, loss: float, tokens_per_second: float) -> None:
        """`steps` more are done; `loss` is that of the last one."""
        if self._bar is not None:
            self._bar.set_postfix_str(
                f"loss {loss:.3f}, {tokens_per_second:,.0f} tokens/s", refresh=False
            )
            self._bar.update(steps)

    def evaluated(self, step: int, *, train: float, val: float) -> None:
        """Losses on fixed batches after `step` steps."""
        line = f"{self._name:<24} {step:>6}/{self._total}  train {train:.4f}  val {val:.4f}"
        if self._bar is not None:
            self._bar.write(line, file=sys.stderr)
        else:
            print(line, file=sys.stderr, flush=True)
