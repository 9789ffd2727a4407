"""The model: what it refuses."""

import torch

from notebooks.nanogpt.model import GPT, GPTConfig
from tests.shared import refuses


def test_what_cannot_be_is_refused():
    shape = {"vocab": 11, "context": 8, "layers": 2, "heads": 2, "width": 16}
    with refuses("9 tokens given, the context is 8"):
        GPT(GPTConfig(**shape))(torch.zeros(1, 9, dtype=torch.int64))
    with refuses(r"dropout must be in \[0, 1\), got 1.0"):
        GPTConfig(**shape, dropout=1.0)
