"""The cache of keys and values in FP8, in models of transformers."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import Tensor

import fp8
from fp8.adapters.transformers import (
    KV_SCALINGS,
    cache_argument,
    cache_errors,
    cache_size,
    kv_cache,
)
from tests.fp8.adapters import hub_models
from tests.fp8.adapters.hub_models import quiet, transformers  # noqa: F401

pytestmark = pytest.mark.filterwarnings("ignore")  # its own

HEADS, WIDTH = 2, 16


def llama(**options) -> transformers.LlamaForCausalLM:
    sizes = {"hidden_size": 4 * WIDTH, "num_attention_heads": 4, "num_key_value_heads": HEADS}
    ends = {"bos_token_id": 0, "eos_token_id": None, "initializer_range": 0.3}
    return hub_models.llama(**sizes, **ends, **options).eval()


def gpt2() -> transformers.GPT2LMHeadModel:
    return hub_models.gpt2(initializer_range=0.3, eos_token_id=None).eval()


MODELS = {"llama": llama, "gpt2": gpt2}
TOKENS = torch.arange(24).view(2, 12) % 64


def scale_of(x: Tensor, scaling: str) -> Tensor:
    """The smallest power of two for which nothing is beyond 448, of all that share it."""
    axes = {"tensor": (0, 1, 2, 3), "head": (2, 3), "token": (3,)}[scaling]
    return (x.float().abs().amax(axes, keepdim=True) / 448).log2().ceil().exp2()


def saved_and_loaded(cache):
    file = io.BytesIO()
    torch.save(cache, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scaling", KV_SCALINGS)
def test_decoded_values_are_those_of_quantize(scaling, dtype):
    """The prompt sets the scales of "tensor" and "head"; each token has its own under "token"."""
    cache = kv_cache(llama().config, scaling=scaling)
    first, second = (torch.randn(3, HEADS, n, WIDTH).to(dtype) * 2 for n in (5, 4))
    cache.update(first, -first, 0)
    keys, values = cache.update(second, -second, 0)
    scales = [scale_of(x, scaling) for x in (first, second if scaling == "token" else first)]
    wanted = [
        fp8.quantize(x, "e4m3", scale=s) for x, s in zip((first, second), scales, strict=True)
    ]
    assert keys.dtype == dtype
    assert torch.equal(keys, torch.cat(wanted, -2))
    assert torch.equal(values, -keys)
    layer = cache.layers[0]
    assert layer.keys.dtype == torch.float8_e4m3fn
    assert layer.keys.shape == (3, HEADS, 9, WIDTH)
    assert cache.get_seq_length() == 9
    if scaling != "token":  # scales of the prompt: what is larger later saturates
        keys, _ = cache.update(second * 1000, second, 0)
        assert float(keys.abs().max()) <= 448 * float(scales[0].max())


def given(model, cache):
    """The keyword argument for a cache."""
    return {cache_argument(model): cache}


@pytest.mark.parametrize("scaling", KV_SCALINGS)
def test_bytes(scaling):
    """Half of bfloat16, and the scales: 4 bytes for each head of each token under "token"."""
    model = llama(head_dim=64).to(torch.bfloat16)
    (row,) = cache_errors(model, TOKENS, scalings=[scaling])
    values = 2 * 2 * 2 * HEADS * 12 * 64  # keys and values, layers, batch
    scales = 2 * 2 * {"tensor": 1, "head": 2 * HEADS, "token": 2 * HEADS * 12}[scaling]
    assert row.plain_bytes == 2 * values
    assert row.bytes == values + 4 * scales
    assert row.bytes < 0.54 * row.plain_bytes
    cache = kv_cache(model.config, scaling=scaling)
    assert cache_size(cache) == (0, 0)
    model(TOKENS, **given(model, cache), use_cache=True)
    assert cache_size(cache) == (row.bytes, values)


@pytest.mark.proves("the field", "KV cache in FP8", how="library")
@pytest.mark.parametrize("scaling", KV_SCALINGS)
@pytest.mark.parametrize("model", MODELS)
def test_generate_is_the_model_on_cast_keys_and_values(model, scaling):
    """Greedy tokens and logits, against a cache in high precision that is given rounded states."""
    model, scales = MODELS[model](), {}

    class Rounded(transformers.DynamicCache):
        def update(self, keys, values, index, *args, **kwargs):
            states = []
            for name, x in (("key", keys), ("value", values)):
                scale = scale_of(x, scaling)
                if scaling != "token":
                    scale = scales.setdefault((name, index), scale)
                states.append(fp8.quantize(x, "e4m3", scale=scale))
            return super().update(*states, index, *args, **kwargs)

    how = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True}
    how |= {"output_logits": True}
    cache = kv_cache(model.config, scaling=scaling)
    got = model.generate(TOKENS, **given(model, cache), **how)
    wanted = model.generate(TOKENS, **given(model, Rounded(config=model.config)), **how)
    plain = model.generate(TOKENS, **how)
    assert torch.equal(got.sequences, wanted.sequences)
    assert torch.equal(torch.stack(got.logits), torch.stack(wanted.logits))
    assert not torch.equal(got.logits[0], plain.logits[0])
    assert cache.get_seq_length() == 12 + 8 - 1


@pytest.mark.parametrize("scaling", KV_SCALINGS)
def test_beam_search(scaling):
    """Sequences of the batch change places, with their scales, also in a copy from a file."""
    model = llama()
    how = {"num_beams": 3, "max_new_tokens": 6, "do_sample": False}
    cache = kv_cache(model.config, scaling=scaling)
    tokens = model.generate(TOKENS, **given(model, cache), **how)
    assert tokens.shape == (2, 18)
    x = torch.randn(3, HEADS, 5, WIDTH) * torch.tensor([1.0, 30.0, 900.0])[:, None, None, None]
    cache = kv_cache(model.config, scaling=scaling)
    keys, _ = cache.update(x, x, 0)
    for change, pick in (
        (lambda c: c.reorder_cache(torch.tensor([2, 0, 0])), lambda x: x[[2, 0, 0]]),
        (lambda c: c.batch_repeat_interleave(2), lambda x: x.repeat_interleave(2, 0)),
        (lambda c: c.batch_select_indices(torch.tensor([0, 3])), lambda x: x[[0, 3]]),
        (lambda c: c.crop(-2), lambda x: x[:, :, :-2]),
    ):
        change(cache)
        keys = pick(keys)
        again = saved_and_loaded(copy.deepcopy(cache))
        new = torch.randn(keys.shape[0], HEADS, 1, WIDTH)
        assert torch.equal(again.update(new, new, 0)[0][:, :, :-1], keys)
    assert cache.get_seq_length() == 3
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(
        cache.update(x, x, 0)[0], kv_cache(model.config, scaling=scaling).update(x, x, 0)[0]
    )


def test_continued_and_assisted():
    """A cache goes on where generate ended; a draft model's rejected tokens are cropped."""
    model = llama()
    cache = kv_cache(model.config)
    begun = model.generate(TOKENS, **given(model, cache), max_new_tokens=4, do_sample=False)
    more = model.generate(begun, **given(model, cache), max_new_tokens=4, do_sample=False)
    whole = kv_cache(model.config)
    assert torch.equal(
        more, model.generate(TOKENS, **given(model, whole), max_new_tokens=8, do_sample=False)
    )
    torch.manual_seed(1)
    options = {"max_new_tokens": 8, "do_sample": False, "assistant_model": llama()}
    helped = model.generate(TOKENS[:1], **given(model, kv_cache(model.config)), **options)
    assert torch.equal(helped, more[:1])


def test_errors_of_logits():
    """The divergence is that of torch's own functions, of the logits of a pass in one piece."""
    model = llama()
    rows = {row.scaling: row for row in cache_errors(model, TOKENS, prompt=5)}
    assert list(rows) == list(KV_SCALINGS)
    with torch.no_grad():
        plain = model(TOKENS).logits[:, 5:].double()
        cast = model(TOKENS, **given(model, kv_cache(model.config))).logits[:, 5:].double()
    divergence = torch.nn.functional.kl_div(
        cast.log_softmax(-1), plain.log_softmax(-1), reduction="none", log_target=True
    )
    row = rows["token"]
    assert row.kl == pytest.approx(float(divergence.sum(-1).mean()), rel=1e-3)
    assert row.largest == pytest.approx(float((cast - plain).abs().max()), rel=1e-3)
    coarse = cache_errors(model, TOKENS, prompt=5, scalings=["token"], format="e5m2")[0]
    assert 0 < row.kl < coarse.kl


def test_mistakes():
    config = llama().config
    with pytest.raises(ValueError, match="unknown scaling 'row'"):
        kv_cache(config, scaling="row")
    with pytest.raises(ValueError, match="unknown rule 'e4m3'"):
        kv_cache(config, rule="e4m3")
    with pytest.raises(ValueError, match="one byte, not e2m1"):
        kv_cache(config, format="e2m1")
    mistral = transformers.MistralConfig(num_hidden_layers=2, sliding_window=8)
    with pytest.raises(ValueError, match="MistralConfig has DynamicSlidingWindowLayer"):
        kv_cache(mistral)
    with pytest.raises(ValueError, match="prompt must be 1 to 11 of 12 tokens, got 12"):
        cache_errors(llama(), TOKENS, prompt=12)
