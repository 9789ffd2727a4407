"""Every architecture of transformers that one rule can reduce: nobody has chosen among them.

The sizes of its default configuration are made small by their names. The first class, in the order
of `TASKS`, and the first batch that run are taken; architectures of which none runs are left out,
with the last error.
"""

from __future__ import annotations

import copy
import inspect
import re
import zlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .case import Case, Stranger, tokens

__all__ = ["strangers"]

BATCH, LENGTH, WORDS, LARGEST = 4, 16, 128, 4_000_000
"""LARGEST: the parameters of a model, beyond which it is left out."""

SIZES = {
    r"(^|_)(layers?|n_layers?|depth|blocks)$": 2,
    r"key_value_heads|kv_heads|num_kv|multi_query_group": 2,
    r"(heads|n_head|num_head)$": 4,
    r"head_dim|kv_channels|d_kv|head_size|qk_dim|_rank$": 16,
    r"vocab_size$|n_vocab": WORDS,
    r"intermediate_size|ffn_dim|d_ff|d_inner|n_inner|mlp_dim|inner_dim": 128,
    r"image_size$|img_size": 32,
    r"patch_size$|num_latents|num_quer|state_size|d_state": 8,
    r"experts$|n_routed_experts": 4,
    r"per_tok|top_k|moe_topk|num_selected": 2,
    r"n_group|topk_group": 1,
    r"(hidden_sz|hidden_size|d_model|n_embd|dim|width|channels|embedding_size|feature_size)$": 64,
    r"max_position|n_positions|max_seq|max_source|max_target": 64,
}
"""Names of whole numbers in a configuration -> their largest value; the first that fits."""

TASKS = {
    "CAUSAL_LM": "input_ids",
    "SEQ_TO_SEQ_CAUSAL_LM": "tokens",
    "MASKED_LM": "input_ids",
    "IMAGE_TEXT_TO_TEXT": "input_ids",
    "IMAGE_CLASSIFICATION": "class",
    "CTC": "characters",
    "AUDIO_CLASSIFICATION": "class",
    "SEMANTIC_SEGMENTATION": "",
    "SEQUENCE_CLASSIFICATION": "class",
    "": "",
}
"""Part of the name of a mapping from configurations to classes -> the labels of its models."""


def strangers() -> list[Stranger]:
    """One for each name in transformers' mapping of configurations."""
    from transformers import CONFIG_MAPPING

    return [
        Stranger(kind, "transformers", partial(_build, kind)) for kind in CONFIG_MAPPING
    ]


def _build(kind: str) -> Case:
    last: Exception = ValueError("no model of these tasks")
    for cls, labels in _classes(kind):
        try:
            model = cls(_configuration(kind))
        except Exception as error:
            last = error
            continue
        if sum(p.numel() for p in model.parameters()) > LARGEST:
            last = ValueError("too large")
            continue
        for batch in _batches(model, labels):
            try:
                with torch.no_grad():
                    model.eval()(**copy.deepcopy(batch))
                return Case(cls(_configuration(kind)), kwargs=batch)
            except Exception as error:
                last = error
    raise last


def _classes(kind: str) -> Iterator[tuple[type[nn.Module], str]]:
    from transformers import CONFIG_MAPPING
    from transformers.models.auto import modeling_auto

    for task, labels in TASKS.items():
        mapping = getattr(
            modeling_auto, f"MODEL_FOR_{task}_MAPPING" if task else "MODEL_MAPPING"
        )
        found = mapping.get(CONFIG_MAPPING[kind], ())
        yield from (
            (cls, labels) for cls in (found if isinstance(found, tuple) else (found,))
        )


def _configuration(kind: str) -> Any:
    from transformers import CONFIG_MAPPING

    return _reduced(CONFIG_MAPPING[kind]())


def _reduced(config: Any) -> Any:
    """A configuration with smaller sizes, without dropout and caches, in place."""
    from transformers import PretrainedConfig

    if hasattr(config, "use_cache"):
        config.use_cache = False
    for name, value in list(vars(config).items()):
        if isinstance(value, PretrainedConfig):
            _reduced(value)
        elif not name.startswith("_") and (new := _smaller(name, value)) is not value:
            setattr(config, name, new)
    return config


def _smaller(name: str, value: Any) -> Any:
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        if re.search(r"token_id|pad_token|eos|bos|sep|cls", name) and value >= WORDS:
            return 100 + zlib.crc32(name.encode()) % 7
        largest = next(
            (size for part, size in SIZES.items() if re.search(part, name)), value
        )
        return min(value, largest)
    if isinstance(value, float):
        return (
            0.0 if re.search(r"dropout|drop_rate|drop_path|layerdrop", name) else value
        )
    if not isinstance(value, list | tuple) or not value:
        return value
    if name in ("layer_types", "mlp_layer_types", "layers_block_type"):
        return (list(dict.fromkeys(value))[:2] * 2)[:2]
    if not all(type(item) is int for item in value):
        return value
    if re.search(r"depth|layers$", name):
        return type(value)(min(item, 1) for item in value)
    if "heads" in name:
        return type(value)(min(item, 2) for item in value)
    if re.search(r"hidden_sizes|embed_dims|channels|dims|conv_dim", name):
        return type(value)(
            min(item, 16 * 2 ** min(i, 2)) for i, item in enumerate(value)
        )
    return value


def _batches(model: nn.Module, labels: str) -> Iterator[dict[str, Tensor]]:
    """Batches by the names of what a model takes, to be tried in this order."""
    takes, config = inspect.signature(model.forward).parameters, model.config
    choices = {
        "class": lambda: torch.randint(0, 2, (BATCH,)),
        "characters": lambda: torch.randint(1, 30, (BATCH, 4)),
        "tokens": lambda: tokens(100, BATCH, LENGTH),
    }

    def labelled(**batch: Tensor) -> dict[str, Tensor]:
        if labels and "labels" in takes:
            batch["labels"] = batch[labels] if labels in batch else choices[labels]()
        return batch

    if "input_ids" in takes:
        ids = tokens(100, BATCH, LENGTH)
        yield labelled(input_ids=ids)
        if "decoder_input_ids" in takes:
            yield labelled(input_ids=ids, decoder_input_ids=tokens(100, BATCH, LENGTH))
    channels = getattr(config, "num_channels", 3)
    sides = dict.fromkeys((getattr(config, "image_size", 32), 32, 64, 224))
    bins = getattr(config, "num_mel_bins", 80)
    shapes = {
        "pixel_values": [(channels, side, side) for side in sides],
        "input_values": [
            (4000,),
            (1, 4000),
            (getattr(config, "max_length", 1024), bins),
        ],
        "input_features": [(bins, 64), (64, bins), (bins, 3000)],
    }
    for name in shapes.keys() & takes.keys():
        for shape in shapes[name]:
            if labels != "input_ids" and all(isinstance(size, int) for size in shape):
                yield labelled(**{name: torch.randn(BATCH, *shape)})
