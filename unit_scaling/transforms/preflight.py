"""The transform that `fp8.preflight` finds as an entry point, group ``fp8.transforms``."""

from __future__ import annotations

from .compile import M
from .unit_scale import unit_scale


def preserve(model: M) -> M:
    """`unit_scale` with init="preserve": the same function, weights and optimizer, so that the
    model trains under recipe "unit" as it would without."""
    return unit_scale(model, init="preserve")


preserve.recipe = "unit"  # type: ignore[attr-defined]
