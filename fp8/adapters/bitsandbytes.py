"""bitsandbytes: its 8-bit optimizers."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from ..common.libraries import need
from ..common.validation import check_name

__all__ = ["optimizer"]


def optimizer(name: str, params: ParamsT, **options: Any) -> Optimizer:
    """Creates an optimizer of ``bitsandbytes.optim``, such as "AdamW8bit".

    States have 8 bits per element; parameters of fewer than 4096 elements have float32 states.
    Adam8bit decays weights as AdamW does, unlike torch's Adam. It also runs on CPUs (since 0.50).

    Args:
        name: the name of an 8-bit optimizer.
        params: parameters, pairs or groups, as for torch's optimizers; also the groups of
            `unit_scaling.optim.scaled_parameters`, whose learning rates follow u-muP.
        options: those of the optimizer.

    Returns:
        The optimizer.

    Raises:
        ValueError: for a name that is not one of its 8-bit optimizers.
        TypeError: for unknown options, such as those only versions before 0.50 had.
        ImportError: without bitsandbytes.
    """
    library = need("bitsandbytes").optim
    check_name("8-bit optimizer", name, [n for n in dir(library) if n.endswith("8bit")])
    return getattr(library, name)(params, **options)
