"""Models nobody here wrote: built from a configuration, with random weights."""

from __future__ import annotations

import logging
import warnings

import pytest
import torch
from torch import nn

import unit_scaling as uu
from benchmarks import zoo
from unit_scaling.transforms import simulate_fp8, unit_scale

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("default")  # theirs to fix

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 64,
}


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=128,
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


MODELS = {
    "Llama": (lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)), 4),
    "T5": (t5, 10),
}


@pytest.fixture(autouse=True)
def quiet() -> None:
    logging.getLogger("transformers").setLevel(logging.ERROR)


def build(name: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return MODELS[name][0](), torch.randint(1, 100, (2, 32))


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(1)
    return model(input_ids=ids, labels=ids).loss


@pytest.mark.proves("unit-scaling", "unit_scale(model)", how="own")
@pytest.mark.parametrize("name", MODELS)
def test_unit_scale_trains_and_finds_the_residuals(name: str) -> None:
    model, ids = build(name)
    ours = unit_scale(model)
    loss_of(ours, ids).backward()
    assert all(p.grad.isfinite().all() for p in ours.parameters() if p.grad is not None)
    residuals = [r for r in uu.report(ours) if r.why.startswith("residual add")]
    assert len(residuals) == MODELS[name][1]
    first = loss_of(ours, ids)
    optimizer = uu.optim.AdamW(ours.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        loss_of(ours, ids).backward()
        optimizer.step()
    assert loss_of(ours, ids) < first


@pytest.mark.proves("unit-scaling", "simulate_fp8(model)", how="own")
@pytest.mark.parametrize("name", MODELS)
def test_simulate_fp8_quantises(name: str) -> None:
    model, ids = build(name)
    ours, plain = loss_of(simulate_fp8(model), ids), loss_of(model, ids)
    assert not torch.equal(ours, plain)
    assert ours.item() == pytest.approx(plain.item(), rel=0.02)


@pytest.mark.parametrize("name", ["BERT", "T5", "ViT", "ConvNeXt"])
def test_verified(name: str) -> None:
    """Of the inputs and outputs of products, of weights and of gradients, 95 % are at scale."""
    model, batch = zoo.build(name)
    ours = unit_scale(model)
    found = uu.verify(ours, batch)
    for kind in ("activation", "weight", "gradient"):
        assert found.share(kind) >= 0.95, found.outside
    assert not uu.report(ours).left_alone


@pytest.mark.parametrize("name", ["Llama", "T5", "BLOOM"])
def test_a_cache_generates_what_the_whole_sequence_does(name: str) -> None:
    """Factors depend on the context length, never on how many tokens a call sees."""
    model, batch = zoo.build(name)
    ours = unit_scale(model).eval()
    given = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    given |= {"output_logits": True, "return_dict_in_generate": True}
    prompt = batch["input_ids"][:1, :5]
    cached, whole = (ours.generate(prompt, use_cache=c, **given) for c in (True, False))
    for a, b in zip(cached.logits, whole.logits, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant: bool) -> None:
    model, batch = zoo.build("Llama")
    ours = unit_scale(model).train()
    older = getattr(ours, "gradient_checkpointing_enable", None)
    enable = getattr(ours, "activation_checkpointing_enable", older)
    gradients = []
    for _ in range(2):
        ours.zero_grad()
        ours(**batch).loss.backward()
        gradients.append([p.grad.clone() for p in ours.parameters()])
        enable({"use_reentrant": reentrant})
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["RWKV", "Mamba"])
def test_loops_with_a_state_keep_their_values(name: str) -> None:
    """With RWKV's quotients of exponentials, which nothing else could make right."""
    found = zoo.examine(name)
    assert found.left_alone == 0
    assert found.verified


@pytest.mark.proves("unit-scaling", "any PyTorch model", how="own")
def test_the_zoo_says_what_became_of_a_model() -> None:
    found = zoo.examine("OPT")
    assert (found.result, found.left_alone, found.residuals) == ("converted", 0, 4)
    assert found.verified
    broken = zoo.Result("x", "X", "language", "refused: because")
    assert not broken.verified
    assert list(zoo.row(broken).values())[-2:] == [None, "refused: because"]
