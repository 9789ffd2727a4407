"""Models nobody here wrote: built from a configuration, with random weights."""

from __future__ import annotations

import logging
import warnings

import pytest
import torch

import unit_scaling as uu
from benchmarks import zoo
from unit_scaling.transforms import unit_scale

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("default")  # theirs to fix


@pytest.fixture(autouse=True)
def quiet() -> None:
    logging.getLogger("transformers").setLevel(logging.ERROR)


@pytest.mark.proves("unit-scaling", "unit_scale(model)", how="own")
@pytest.mark.parametrize("name", ["Llama", "T5"])
def test_it_trains(name: str) -> None:
    model, batch = zoo.build(name)
    ours = unit_scale(model)
    first = ours(**batch).loss
    assert not uu.report(ours).left_alone
    model.load_state_dict(ours.state_dict(), strict=True)
    assert model.eval()(**batch).loss == ours.eval()(**batch).loss
    ours.train()
    optimizer = uu.optim.AdamW(ours.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        ours(**batch).loss.backward()
        assert all(p.grad.isfinite().all() for p in ours.parameters() if p.grad is not None)
        optimizer.step()
    assert ours(**batch).loss < first


@pytest.mark.parametrize("name", ["Llama", "T5", "BLOOM"])
def test_a_cache_generates_what_the_whole_sequence_does(name: str) -> None:
    """Of an encoder and a decoder `generate` calls parts, so that it is no first call."""
    model, batch = zoo.build(name)
    ours = unit_scale(model).eval()
    ours(**batch)
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


@pytest.mark.parametrize("name", ["BERT", "T5", "ViT", "ConvNeXt", "RWKV", "Mamba"])
def test_casts_are_in_range(name: str) -> None:
    """At the second step, with the scales of the first."""
    found = zoo.examine(name)
    assert (found.result, found.left_alone) == ("converted", 0)
    assert found.casts >= 0.97
    assert found.weights == 1


@pytest.mark.proves("unit-scaling", "any PyTorch model", how="own")
def test_the_zoo_says_what_became_of_a_model() -> None:
    found = zoo.examine("OPT")
    assert (found.result, found.left_alone) == ("converted", 0)
    assert found.casts >= 0.97
    broken = zoo.Result("x", "X", "language", "refused: because")
    assert not broken.verified
    assert list(zoo.row(broken).values())[-2:] == [None, "refused: because"]
