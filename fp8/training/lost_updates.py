"""Updates of stored weights, such as merged adapters, that the next rounding to the format loses.

A weight in low precision is on the grid of its format. An update of less than half a step is then
rounded to nothing, however often it is merged, whereas a weight off the grid moves by a step with a
probability of update / step: that is coarse, but right in the mean. So weights that come in 16 bits
are not watched. Those that `fp8.load` has read from a file in low precision, as parameters in high
precision, are on its grid: a sample of what they were is kept, an attribute of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from ..casts.scaled_tensor import ScaledTensor
from ..warnings import RoundingWarning, show

MOSTLY = 0.5
"""The share of an update from which its loss is named."""

NOTHING = 2.0**-20
"""The size of an update, relative to the weight, up to which it is the rounding in float32 of one
that was taken back."""

SAMPLED = 1 << 12
"""The number of values of such a sample: 16 kB of each weight."""

LOADED = "fp8_loaded"
"""The attribute of a parameter that is the sample."""


def remember(parameter: Tensor, values: Tensor) -> None:
    """Notes the values that a parameter gets from a file in low precision."""
    if isinstance(parameter, nn.Parameter):
        vars(parameter)[LOADED] = sample(values).clone()


def sample(values: Tensor) -> Tensor:
    """About `SAMPLED` values, or all of fewer."""
    # An odd step, or all would be of one column.
    return values.detach().flatten()[:: values.numel() // SAMPLED | 1]


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
        was stored. A parameter that trains is none that an adapter was merged into: its updates add
        up before they are rounded."""
        before = vars(weight).get(LOADED)
        if isinstance(weight, ScaledTensor):
            # Only weights that were written to since they were stored keep what they had before.
            origin = weight.memory.origin
            if origin is not None:
                after = weight.dequantize(torch.float32)
                self._add(name, origin.numbers(), after, rounded)
        elif before is not None and not weight.requires_grad:
            # In the dtype of today, as `nn.Module.to` is no update.
            before = before.to(weight.dtype).float()
            self._add(name, before, sample(weight).float(), lambda: sample(rounded()))

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
                rounded = partial(weight.dequantize, torch.float32)
                self._add(name, origin.numbers(), after, rounded)

    def _add(
        self,
        name: str,
        before: Tensor,
        after: Tensor,
        rounded: Callable[[], Tensor],
    ) -> None:
        before = before.to(after.device)
        if before.shape != after.shape:
            return
        if (after - before).norm() <= NOTHING * before.norm():
            return
        self.count += 1
        share = lost_share(before, after, rounded().to(after.device))
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
