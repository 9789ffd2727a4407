"""Where a preflight's problem comes from: a function in a file, or a configuration of
transformers."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..common.libraries import need
from .demo import text_batches
from .training import FullSize, Setup

__all__ = ["from_function", "from_transformers", "shrunk"]

WIDTH, LAYERS, HEADS, EXPERTS = 256, 4, 4, 4
"""The largest width and numbers of layers, heads and experts of a configuration that is trained."""

BATCH, CONTEXT, COUNT = 4, 128, 1024

BASE_LR, BASE_WIDTH = 2e-3, 128
"""AdamW's learning rate is ``BASE_LR * BASE_WIDTH / width``: hidden weights' rates are inverse to
their fan-in (u-muP, arXiv:2407.17465, table 2)."""


def from_function(name: str) -> Callable[..., Any]:
    """The function of "train.py:setup" or "package.module:setup".

    Raises:
        ValueError: for a text without a colon, a missing file, module or function.
        TypeError: if it is not callable.
    """
    where, colon, function = name.rpartition(":")
    if not (colon and where and function):
        raise ValueError(f"give a file and a function, as train.py:setup, got {name!r}")
    found = getattr(_module(where), function, None)
    if found is None:
        raise ValueError(f"{where} has no {function!r}")
    if not callable(found):
        raise TypeError(f"{name} is a {type(found).__name__}, not a function that returns a setup")
    return found


def _module(where: str) -> Any:
    if not where.endswith(".py"):
        try:
            return importlib.import_module(where)
        except ModuleNotFoundError as error:
            raise ValueError(f"no module {where!r}: {error}") from error
    path = Path(where).resolve()
    if not path.is_file():
        raise ValueError(f"no file {where!r}")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module


def from_transformers(config: str | Path, text: str | Path) -> Callable[[int], Setup]:
    """A problem from a configuration of a causal language model.

    The model that is trained is `shrunk`, has random weights and reads bytes. The products of the
    full size are traced without memory, on the meta device, for the estimates.

    Args:
        config: a config.json.
        text: a file to train on.

    Returns:
        A function of a seed that returns the setup.

    Raises:
        ImportError: without transformers.
        ValueError: if the file is not a configuration of a causal language model.
    """
    transformers = need("transformers")
    values = json.loads(Path(config).read_text(encoding="utf-8"))
    if "model_type" not in values:
        raise ValueError(f"{config} has no model_type: it is no configuration of transformers")
    data = Path(text).read_bytes()
    full = _config(transformers, values)
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


def _config(transformers: Any, values: dict[str, Any]) -> Any:
    values = dict(values)
    return transformers.AutoConfig.for_model(values.pop("model_type"), **values)


def _full_size(transformers: Any, config: Any) -> FullSize:
    """The model without memory, and a batch of 8192 tokens as the shapes of a training step."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
        length = min(4096, getattr(config, "max_position_embeddings", 4096))
        ids = torch.zeros(8192 // length, length, dtype=torch.long)
    return FullSize(model, {"input_ids": ids})


def shrunk(config: Any) -> Any:
    """A copy of a configuration for two cores: at most 256 wide, 4 layers, 4 heads, 4 experts.

    Every size (an int named ``*_size``, ``*_dim``, ``*_rank``, ``n_embd``, ``n_inner``, ``d_*``)
    is multiplied by the same factor, 256 / hidden_size, and rounded to a multiple of 16; the
    dimension of a head becomes at most 64. Heads of keys and values keep their ratio to the heads.
    The vocabulary becomes 256 bytes. Lists with one entry per layer are cut.
    """
    small = type(config).from_dict(config.to_dict())
    depth, factor = config.num_hidden_layers, min(WIDTH / config.hidden_size, 1.0)
    heads = config.num_attention_heads
    ratio = heads // (getattr(config, "num_key_value_heads", None) or heads)
    for name, value in config.to_dict().items():
        if isinstance(value, list) and len(value) == depth:
            setattr(small, name, value[:LAYERS])
        elif name.endswith("head_dim") and value:
            setattr(small, name, min(value, WIDTH // HEADS))
        elif isinstance(value, int) and not isinstance(value, bool) and _is_size(name):
            setattr(small, name, max(16, round(value * factor / 16) * 16))
        elif name.endswith("token_id"):
            setattr(small, name, None)
        elif "experts" in name and isinstance(value, int):
            most = EXPERTS // 2 if "per_tok" in name else EXPERTS
            setattr(small, name, min(value, most))
        elif name in ("n_group", "topk_group"):  # of experts
            setattr(small, name, 1)
    small.num_hidden_layers = min(depth, LAYERS)
    small.num_attention_heads = min(heads, HEADS)
    if getattr(config, "num_key_value_heads", None):
        small.num_key_value_heads = max(1, small.num_attention_heads // ratio)
    small.vocab_size = 256
    return small


def _is_size(name: str) -> bool:
    ends = ("_size", "_dim", "_rank", "n_embd", "n_inner", "_ffn")
    return (name.endswith(ends) or name.startswith("d_")) and "vocab" not in name
