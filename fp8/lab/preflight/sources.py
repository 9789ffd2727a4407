"""A preflight's problem from a configuration of transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...common.libraries import need
from ...common.step import described
from .demo import text_batches
from .training import FullSize, Setup

WIDTH, LAYERS, HEADS, EXPERTS = 256, 4, 4, 4
"""The largest width and numbers of layers, heads and experts of a configuration that is trained."""

VOCABULARY, LARGEST = 256, 50_000_000
"""The words of the model that is trained, which reads bytes; and its largest number of
parameters."""

BATCH, CONTEXT, COUNT = 4, 128, 1024

BASE_LR, BASE_WIDTH = 2e-3, 128
"""AdamW's learning rate is ``BASE_LR * BASE_WIDTH / width``: hidden weights' rates are inverse to
their fan-in (u-muP, arXiv:2407.17465, table 2)."""


def from_transformers(config: str | Path, text: str | Path) -> Callable[[int], Setup]:
    """A problem from a configuration of a causal language model.

    The model that is trained is `shrunk`, has random weights and reads the bytes of the file
    ``text``. The products of the full size are traced without memory, on the meta device, for the
    estimates. Returns a function of a seed.

    Raises ImportError without transformers, and ValueError if ``config`` is no configuration of
    transformers or one that `shrunk` refuses.
    """
    transformers = need("transformers")
    values = json.loads(Path(config).read_text(encoding="utf-8"))
    if "model_type" not in values:
        raise ValueError(f"{config} has no model_type: it is no configuration of transformers")
    data = Path(text).read_bytes()
    full = transformers.AutoConfig.for_model(**values).get_text_config(decoder=True)
    small = shrunk(full)

    def setup(seed: int) -> Setup:
        model = transformers.AutoModelForCausalLM.from_config(small)
        lr = BASE_LR * BASE_WIDTH / small.hidden_size
        batches = text_batches(data, BATCH, CONTEXT - 1, COUNT, seed)
        return Setup(
            model,
            [{"input_ids": ids, "labels": ids} for ids in batches],
            optimizer=torch.optim.AdamW(model.parameters(), lr=lr),
            full_size=_full_size(transformers, full),
        )

    return setup


def _full_size(transformers: Any, config: Any) -> FullSize:
    """The model without memory, and a batch of 8192 tokens. In bfloat16, the only dtype of grouped
    products without memory: estimates depend on shapes only."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
        length = min(4096, getattr(config, "max_position_embeddings", 4096))
        ids = torch.zeros(8192 // length, length, dtype=torch.long)
    return FullSize(model, {"input_ids": ids})


def shrunk(config: Any) -> Any:
    """A copy of a configuration for two cores: at most 256 wide, 4 layers, 4 heads, 4 experts.

    Sizes are multiplied by 256 / hidden_size and rounded to a multiple of 16; the dimension of a
    head becomes at most 64. Numbers of heads keep their ratios; so do numbers, lists and indices of
    layers, of which each kind stays. The vocabulary becomes 256 bytes. Of a configuration with
    several parts it is that of the language model. Raises ValueError if its model, which is built
    and called once, does not run.
    """
    config, why = config.get_text_config(decoder=True), ""
    for own_heads in (True, False):
        try:
            scale = _scale(config, own_heads)
            small = type(config).from_dict(_scaled(config.to_dict(), scale))
            why = _why_not(small)
        except Exception as error:  # of the code of a model
            why = described(error)
        if not why:
            return small
    raise ValueError(
        f"a configuration of {config.model_type!r} is not made smaller by rule ({why}): write a "
        "function that returns the small model and its batches, and give FILE.py:function"
    )


class _Scale(NamedTuple):
    """What sizes and numbers of heads are multiplied by. depth: the number of layers now."""

    width: float
    heads: float
    depth: int

    def layers(self, number: int) -> int:
        """A number of layers, or an index of one."""
        return number if self.depth <= LAYERS else round(number * LAYERS / self.depth)


def _scale(config: Any, own_heads: bool) -> _Scale:
    """own_heads: whether heads have a factor of their own. Those of state-space models, which have
    a fixed size, follow the width, as all do where that fails."""
    width = min(WIDTH / config.hidden_size, 1.0)
    heads = getattr(config, "num_attention_heads", None) if own_heads else None
    return _Scale(width, min(HEADS / heads, 1.0) if heads else width, config.num_hidden_layers)


def _scaled(values: dict[str, Any], scale: _Scale) -> dict[str, Any]:
    return {name: _scaled_value(name, value, scale) for name, value in values.items()}


def _scaled_value(name: str, value: Any, scale: _Scale) -> Any:
    if name.endswith("_config") and isinstance(value, dict):
        return _scaled(value, scale)
    if name == "use_cache":
        return False
    if isinstance(value, list):
        return _scaled_list(name, value, scale)
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    for pattern, of in _BY_NAME.items():
        if re.search(pattern, name):
            return of(value, scale)
    return value


def _scaled_list(name: str, value: list[Any], scale: _Scale) -> list[Any]:
    """One entry per layer: some, of each kind. Indices of layers: those of the same share. Tokens:
    `NO_TEXT`."""
    if name.endswith("token_id"):
        return [NO_TEXT]
    if len(value) == scale.depth:
        return _thinned(value)
    if "layer" in name and all(isinstance(entry, int) for entry in value):
        return sorted({scale.layers(entry) for entry in value})
    return value


def _thinned(values: list[Any]) -> list[Any]:
    """At most LAYERS entries in their order: the first of each kind, and others at equal
    distances."""
    if len(values) <= LAYERS:
        return values
    first = [i for i, value in enumerate(values) if values.index(value) == i]
    even = [round(i * (len(values) - 1) / (LAYERS - 1)) for i in range(LAYERS)]
    return [values[i] for i in sorted(list(dict.fromkeys([*first, *even]))[:LAYERS])]


def _size(value: int, scale: _Scale) -> int:
    return max(min(value, 16), round(value * scale.width / 16) * 16)


_BY_NAME: dict[str, Callable[[int, _Scale], int]] = {
    r"token_id$": lambda value, scale: NO_TEXT,
    r"^type_vocab_size$": lambda value, scale: value,
    r"vocab_size": lambda value, scale: VOCABULARY,
    r"(^|_)layers?$|_(period|offset)$": lambda value, scale: scale.layers(value),
    r"per_tok$|(^|_)top_?k$|^moe_k$": lambda value, scale: min(value, EXPERTS // 2),
    r"experts": lambda value, scale: min(value, EXPERTS),
    r"^(n|topk)_group$": lambda value, scale: min(value, 1),
    r"head_?dim$|_d_head$": lambda value, scale: min(value, WIDTH // HEADS),
    r"heads?$": lambda value, scale: max(1, round(value * scale.heads)) if value else 0,
    r"_(size|dim|rank|ffn|width)$|^n_(embd|inner)$|^d_": _size,
}
"""What a name in a configuration ends with or contains -> its value; the first that fits."""

NO_TEXT = 255
"""The token for all ids with a meaning: a byte that UTF-8 does not have."""


def _why_not(config: Any) -> str:
    """Why the model of a configuration cannot be trained here; "" if it can."""
    with torch.random.fork_rng():
        model = need("transformers").AutoModelForCausalLM.from_config(config)
        size = sum(parameter.numel() for parameter in model.parameters())
        if size > LARGEST:
            return f"{size:,} parameters are left"
        ids = torch.arange(1, 33).reshape(2, 16)
        loss = model(input_ids=ids, labels=ids).loss
    return "" if loss is not None and bool(loss.isfinite()) else f"its loss is {loss}"
