"""Error feedback: what weights lose when they are rounded goes into the first moment of Adam.

ECO (Nikdan et al. 2026, arXiv:2601.22101, algorithm 3). Weights in low precision then need no
master copy: a step that is too small to change one is not lost, but makes later steps larger.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..common.dtensor import part_of
from ..common.validation import check_flag
from .encodings import ENCODINGS, MOMENTS, Encoded, Encoding, decode, write
from .state import Group, is_plain

ALLOWED = tuple(name for name in MOMENTS["first_moment"] if ENCODINGS[name].scale != "tensor")
"""The first moments that hold what is added: a scale for the tensor is set before the step."""


def check_feedback(group: Group) -> None:
    """Raises ValueError or TypeError if a group asks for error feedback and cannot have it."""
    check_flag("error_feedback", wanted := group.get("error_feedback", False))
    if not wanted:
        return
    if group["master_weights"] is not None or group["betas"][0] == 0:
        raise ValueError(
            "error_feedback needs master_weights=None, whose place it takes, and betas[0] above 0; "
            f"got {group['master_weights']!r} and {group['betas'][0]}"
        )
    if group["first_moment"] not in ALLOWED:
        raise ValueError(
            f"error_feedback needs first_moment {', '.join(map(repr, ALLOWED))}, which hold what "
            f"it adds; got {group['first_moment']!r}"
        )


def has_feedback(parameter: Tensor, group: Group) -> bool:
    """Whether the rounding of a parameter is fed back: not that of a plain float32 one."""
    here = part_of(parameter)
    coarse = here.dtype != torch.float32 or not is_plain(here)
    return coarse and bool(group.get("error_feedback", False))


def add_error(
    error: Tensor, first: Encoded, second: Encoded, encoding: Encoding, numbers: list[float]
) -> None:
    """Adds the error of weights, those before rounding minus those after, to the first moment:

        m += (1 - 1 / b1) / size * (root sqrt(v) + eps) * error

    encoding: of the first moment, which is rounded to nearest. numbers: b1, size, root and eps of
    the step, as in `fp8.optim.adam`. A step of size 0 has no error.
    """
    b1, size, root, eps = numbers
    if size:
        share = (1 - 1 / b1) / size
        m = decode(first) + error * share * (decode(second).sqrt() * root + eps)
        write(m, first, encoding, None)
