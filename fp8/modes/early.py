"""Modes that see each call before any `fp8.autocast`."""

from __future__ import annotations

import torch
from torch.overrides import TorchFunctionMode

from ..frame import FRAMES, close_frame, open_frame
from ..torch_internals.hidden_functions import reveal


class EarlyMode(TorchFunctionMode):
    """A torch-function mode that sees each call before any autocast while it is entered: one that
    records a model or replaces its functions."""

    def __enter__(self) -> EarlyMode:
        if torch.compiler.is_dynamo_compiling():
            reveal()
        open_frame(self, early_modes=(*FRAMES.items[-1].early_modes, self))
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        close_frame(self)
        super().__exit__(*error)
