"""Models of text."""

from __future__ import annotations

from .case import Case, Stranger, tokens

__all__ = ["STRANGERS"]


def _decoder() -> Case:
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    layers = Decoder(dim=64, depth=2, heads=4, attn_dim_head=16)
    model = AutoregressiveWrapper(TransformerWrapper(num_tokens=128, max_seq_len=32, attn_layers=layers))
    return Case(model, (tokens(128, 8, 33),))


STRANGERS = [Stranger("Decoder", "x-transformers", _decoder)]
