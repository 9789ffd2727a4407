"""transformers: a cache of keys and values in FP8 for ``generate``, and what it costs in logits.

model.generate(ids, cache=kv_cache(model.config, scaling="token"))  # 5.24; see cache_argument
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..common.libraries import need
from ..common.step import Batch, evaluating
from ..common.validation import check_name
from ..formats.format import Format, get_format
from ..formats.quantize import quantize
from ..recipes.scaling import SCALINGS, scale_of

__all__ = [
    "KV_SCALINGS",
    "CacheError",
    "CacheSize",
    "cache_argument",
    "cache_errors",
    "cache_size",
    "is_pretrained",
    "kv_cache",
]

KV_SCALINGS: dict[str, tuple[int, ...] | None] = {
    "tensor": None,
    "head": (-2, -1),
    "token": (-1,),
}
"""Scaling of a cache -> the axes of keys (batch, heads, tokens, width) that share a scale; None:
all. The scale of "tensor" and "head" (one for each head of each sequence) is that of the first
tokens, the prompt, and stays; larger values of later tokens saturate."""

_STATES, _SCALES = ("keys", "values"), ("key_scale", "value_scale")
"""The tensors of a layer of a cache, and of one in FP8."""


def kv_cache(
    config: Any, *, format: str | Format = "e4m3", scaling: str = "token", rule: str = "up"
) -> Any:
    """A cache for ``generate`` whose keys and values are stored in FP8.

    The model attends to the decoded values, in the dtype of its keys and values, also for the
    tokens of the current pass. Finite values beyond the format and Inf saturate; NaN stays NaN.
    Decoded values have no gradient. `cache_argument` is the name under which it is passed.

    Args:
        config: the configuration of the model, all of whose layers attend to all tokens.
        format: a name in `fp8.FORMATS` or a `Format` of eight bits that has a torch dtype.
        scaling: a name in `KV_SCALINGS`.
        rule: how a scale is computed from the largest magnitude: a rule of scaling "tensor" in
            `fp8.recipes.scaling.SCALINGS`.

    Returns:
        A ``transformers.Cache``. Its layers hold ``keys`` and ``values`` (batch, heads, tokens,
        width) in the dtype of the format, and ``key_scale`` and ``value_scale``, float32, which
        broadcast to them.

    Raises:
        ValueError: for an unknown name, a format without a dtype of one byte, and a model with
            layers that keep other states (sliding windows, linear attention).
        ImportError: without transformers.
    """
    check_name("scaling", scaling, KV_SCALINGS)
    check_name("rule", rule, SCALINGS["tensor"].rules)
    chosen = get_format(format)
    if chosen.dtype is None or chosen.dtype.itemsize != 1:
        raise ValueError(f"a cache needs a format with a torch dtype of one byte, not {chosen}")
    library = need("transformers").cache_utils
    layers = library.DynamicCache(config=config).layers
    others = {type(layer).__name__ for layer in layers if type(layer) is not library.DynamicLayer}
    if others:
        raise ValueError(
            f"a cache in FP8 is for layers that attend to all tokens (DynamicLayer); "
            f"{type(config).__name__} has {', '.join(sorted(others))}"
        )
    return library.Cache(layers=[_layer_class()(chosen, scaling, rule) for _ in layers])


def is_pretrained(model: Any) -> bool:
    """Whether a model is one of transformers. Imports nothing of the library for other models."""
    library = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(model, library.PreTrainedModel)


def cache_argument(model: Any) -> str:
    """The name under which a model of transformers, and its ``generate``, take a cache: "cache",
    or before transformers 5.24 "past_key_values"."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


class CacheError(NamedTuple):
    """What a cache changes in the logits of a batch."""

    scaling: str
    kl: float
    """The mean Kullback-Leibler divergence from the next-token distribution with a cache in high
    precision to that with this one, in nats per token."""
    largest: float
    """The largest difference of a logit."""
    bytes: int
    """The bytes of keys, values and scales after the batch."""
    plain_bytes: int
    """The same in high precision."""


@torch.no_grad()
def cache_errors(
    model: Any,
    input_ids: Tensor,
    *,
    prompt: int | None = None,
    scalings: Iterable[str] = tuple(KV_SCALINGS),
    **options: Any,
) -> list[CacheError]:
    """Compares the logits of a model with caches in FP8 and in high precision.

    The prompt is processed in one pass, which sets the scales, and the remaining tokens in a second
    one, whose logits are compared: each token attends to what it would in ``generate``. The model
    runs as it is; call ``model.eval()`` before.

    Args:
        model: a causal language model of transformers.
        input_ids: (batch, tokens), without padding.
        prompt: the number of tokens of the prompt; None: half of them.
        scalings: names in `KV_SCALINGS`.
        options: format and rule of `kv_cache`.

    Returns:
        A row for each scaling, in their order. NaN in logits gives NaN.

    Raises:
        ValueError: as `kv_cache`, and for a prompt that leaves no token before or after it.
    """
    tokens = input_ids.shape[-1]
    prompt = tokens // 2 if prompt is None else prompt
    if not 0 < prompt < tokens:
        raise ValueError(f"prompt must be 1 to {tokens - 1} of {tokens} tokens, got {prompt}")
    plain = need("transformers").cache_utils.DynamicCache(config=model.config)
    wanted = _logits(model, input_ids, prompt, plain)
    rows = []
    for scaling in scalings:
        cache = kv_cache(model.config, scaling=scaling, **options)
        got = _logits(model, input_ids, prompt, cache)
        log_p, log_q = wanted.log_softmax(-1), got.log_softmax(-1)
        divergence = float((log_p.exp() * (log_p - log_q)).sum(-1).mean())
        largest = float((wanted - got).abs().max())
        sizes = [cache_size(each).bytes for each in (cache, plain)]
        rows.append(CacheError(scaling, divergence, largest, *sizes))
    return rows


def _logits(model: Any, input_ids: Tensor, prompt: int, cache: Any) -> Tensor:
    """The logits after the prompt, in float64."""
    options = {cache_argument(model): cache, "use_cache": True}
    model(input_ids[:, :prompt], **options)
    return model(input_ids[:, prompt:], **options).logits.double()


class CacheSize(NamedTuple):
    """bytes: of keys, values and scales. elements: of keys and values."""

    bytes: int
    elements: int


def cache_size(cache: Any) -> CacheSize:
    """The size of a cache of `kv_cache`, or of a ``transformers.DynamicCache``."""
    states, scales = (
        [x for layer in cache.layers for n in names if (x := getattr(layer, n, None)) is not None]
        for names in (_STATES, _SCALES)
    )
    return CacheSize(sum(x.nbytes for x in (*states, *scales)), sum(x.numel() for x in states))


def has_cache(model: Any, batch: Batch) -> bool:
    """Whether a model of transformers generates with a cache, and the batch has tokens for it."""
    if not is_pretrained(model):
        return False
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    uses = getattr(model.config, "use_cache", False) and model.can_generate()
    return bool(uses) and isinstance(ids, Tensor) and ids.dim() == 2 and ids.shape[1] > 1


@torch.no_grad()
def cache_found(model: Any, batch: Any, full: Any = None) -> dict[str, float]:
    """The "bytes" of a `kv_cache` per token and sequence, "bytes_bf16" in 16 bits, and "kl" and
    "largest" of `CacheError`. full: the model whose bytes are counted, on the meta device."""
    counted = model if full is None else full
    cache = kv_cache(counted.config)
    tokens = 8  # of the pass that determines the shapes
    ids = torch.zeros(1, tokens, dtype=torch.long, device=next(counted.parameters()).device)
    with evaluating(model, counted):
        counted(ids, **{cache_argument(counted): cache}, use_cache=True)
        (row,) = cache_errors(model, batch["input_ids"], scalings=("token",))
    size = cache_size(cache)
    return {
        "bytes": size.bytes / tokens,
        "bytes_bf16": 2 * size.elements / tokens,
        "kl": row.kl,
        "largest": row.largest,
    }


class _Stored:
    """The methods of a layer of the cache that differ from DynamicLayer, the other base class."""

    keys: Tensor
    values: Tensor
    dtype: torch.dtype
    get_seq_length: Callable[[], int]

    def __init__(self, format: Format, scaling: str, rule: str) -> None:
        super().__init__()
        self.format, self.scaling, self.rule = format, scaling, rule
        self.key_scale: Tensor | None = None
        self.value_scale: Tensor | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = (
            x.new_empty((*x.shape[:-2], 0, x.shape[-1]), dtype=self.format.dtype)
            for x in (key_states, value_states)
        )
        self.is_initialized = True

    @torch.no_grad()
    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Appends (batch, heads, new tokens, width); returns all keys and values, decoded."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys, self.key_scale = self._append(self.keys, self.key_scale, key_states)
        self.values, self.value_scale = self._append(self.values, self.value_scale, value_states)
        return self._decoded(self.keys, self.key_scale), self._decoded(
            self.values, self.value_scale
        )

    def _decoded(self, codes: Tensor, scale: Tensor | None) -> Tensor:
        """The stored values, of which an empty cache has none."""
        return (codes if scale is None else codes.to(scale.dtype) * scale).to(self.dtype)

    def _append(
        self, stored: Tensor, scale: Tensor | None, states: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """``states`` after the ``stored`` ones, and the scales of both."""
        if not states.numel():
            return stored, scale
        wide = states.to(torch.promote_types(states.dtype, torch.float32))
        if scale is None or self.scaling == "token":
            new = scale_of(wide, KV_SCALINGS[self.scaling], self.format, self.rule)
        else:
            new = scale
        codes = quantize(wide / new, self.format).to(stored.dtype)
        both = [x.view(torch.uint8) for x in (stored, codes)]
        scales = new if scale is None or new is scale else torch.cat([scale, new], -2)
        return torch.cat(both, -2).view(stored.dtype), scales

    def _select(self, pick: Callable[[Tensor], Tensor]) -> None:
        """Replaces the sequences of the batch by ``pick`` of them."""
        if not self.get_seq_length():
            return
        for name in _STATES:
            stored = getattr(self, name)
            setattr(self, name, pick(stored.view(torch.uint8)).view(stored.dtype))
        for name in _SCALES if self.scaling != "tensor" else ():
            setattr(self, name, pick(getattr(self, name)))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._select(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._select(lambda x: x.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._select(lambda x: x[indices, ...])

    def crop(self, tokens: int) -> None:
        super().crop(tokens)  # type: ignore[misc]
        if self.scaling == "token" and self.key_scale is not None:
            for name in _SCALES:
                setattr(self, name, getattr(self, name)[..., : self.keys.shape[-2], :])

    def reset(self) -> None:
        super().reset()  # type: ignore[misc]
        self.key_scale = self.value_scale = None


def __getattr__(name: str) -> Any:
    if name != "FP8Layer":  # which pickle looks up here
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _layer_class()


@functools.cache
def _layer_class() -> type[Any]:
    base = need("transformers").cache_utils.DynamicLayer
    return type("FP8Layer", (_Stored, base), {"__module__": __name__})
