"""Updates of stored weights, such as merged adapters, that the next rounding to the format loses.

A weight in low precision is on the grid of its format. An update of less than half a step is then
rounded to nothing, however often it is merged, whereas a weight off the grid moves by a step with a
probability of update / step: that is coarse, but right in the mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ..casts.scaled_tensor import Memory, ScaledTensor
from ..warnings import RoundingWarning, show

MOSTLY = 0.5
"""The share of an update from which its loss is named."""

NOTHING = 2.0**-20
"""The size of an update, relative to the weight, up to which it is the rounding in float32 of one
that was taken back."""


def lost_share(before: Tensor, after: Tensor, rounded: Tensor) -> float:
    """The share of the update from ``before`` to ``after`` that ``rounded`` lacks: 1 minus the
    projection of ``rounded - before`` on it. Tensors of one shape; 0 without an update, and for one
    that is not finite."""
    # A projection, not a norm: errors of rounding are as large as a small update, but do not
    # point along it.
    update = after.double() - before
    made = ((rounded.double() - before) * update).sum()
    share = 1 - made / update.square().sum()
    if not share.isfinite():
        return 0.0
    return share.item()


class LostUpdates:
    """The weights of which rounding loses more than `MOSTLY` of an update."""

    def __init__(self) -> None:
        self.shares: dict[str, float] = {}
        self.count = 0

    @torch.no_grad()
    def add(self, name: str, weight: Tensor, rounded: Callable[[], Tensor]) -> None:
        """Adds a weight whose values are to be rounded, unless nothing was written to it since it
        was stored."""
        if not isinstance(weight, ScaledTensor):
            return
        # Only weights that were written to since they were stored keep what they had before.
        origin = weight.memory.origin
        if origin is not None:
            self._add(name, origin, weight.dequantize(torch.float32), rounded())

    @contextmanager
    def watching(self, name: str, weight: ScaledTensor) -> Iterator[None]:
        """Adds a weight that the block stores in its format."""
        origin = weight.memory.origin
        if origin is None:
            yield
            return
        with torch.no_grad():
            after = weight.dequantize(torch.float32)
            yield
            if weight.scale is not None:
                self._add(name, origin, after, weight.dequantize(torch.float32))

    def _add(self, name: str, origin: Memory, after: Tensor, rounded: Tensor) -> None:
        before = origin.numbers().to(after.device)
        if before.shape != after.shape:
            return
        if (after - before).norm() <= NOTHING * before.norm():
            return
        self.count += 1
        share = lost_share(before, after, rounded.to(after.device))
        if share > MOSTLY:
            self.shares[name] = share

    def warn(self) -> None:
        """Names the weight that loses most."""
        if not self.shares:
            return
        name = max(self.shares, key=lambda name: self.shares[name])
        show(
            RoundingWarning,
            f"rounding loses {self.shares[name]:.0%} of what was written to {name!r} since it "
            f"was stored, and more than {MOSTLY:.0%} in {len(self.shares)} of {self.count} "
            "weights: most of the update is below half a step of the format. Keep the adapters "
            "apart from the weights, or keep the merged weights in 16 bits: "
            "fp8.store_frozen(model, None), save_pretrained",
        )
