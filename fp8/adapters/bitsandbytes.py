"""bitsandbytes: its 8-bit optimizers."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from ..common.libraries import need
from ..common.validation import check_name

__all__ = ["optimizer"]


def optimizer(name: str, params: ParamsT, **options: Any) -> Optimizer:
    """The optimizer of that name in ``bitsandbytes.optim``, "AdamW8bit" for one.

    params: parameters, pairs or groups as torch's optimizers take them; so also the groups of
    `unit_scaling.optim.scaled_parameters`, whose learning rates follow u-muP.
    options: its own; other ones, such as those that versions before 0.50 had, are a TypeError.
    States have 8 bits a number, in blocks of 256 with a scale each; parameters of fewer than 4096
    elements have them in float32. Adam8bit decays weights as AdamW does, not as torch's Adam. Runs
    on CPUs too (since 0.50), more slowly than torch's.
    Raises ValueError for a name that is none of its 8-bit optimizers, ImportError without it.
    """
    library = need("bitsandbytes").optim
    check_name("8-bit optimizer", name, [n for n in dir(library) if n.endswith("8bit")])
    return getattr(library, name)(params, **options)
