"""The model: its shape, its initialisation, causality, sampling."""

import pytest
import torch

from notebooks.nanogpt.model import GPT, GPTConfig


def build(**changes: object) -> GPT:
    torch.manual_seed(0)
    shape = {"vocab": 11, "context": 8, "layers": 2, "heads": 2, "width": 16}
    return GPT(GPTConfig(**{**shape, **changes}))


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="9 tokens given, the context is 8"):
        build()(torch.zeros(1, 9, dtype=torch.int64))
    for changes, message in (
        ({"heads": 3}, "width must be a multiple of heads, got width 16 and 3 heads"),
        ({"layers": 0}, "layers must be at least 1, got 0"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
    ):
        with pytest.raises(ValueError, match=message):
            build(**changes)
