"""The model: its shape, its initialisation, causality, sampling."""

import math

import pytest
import torch

from notebooks.nanogpt.model import GPT, GPTConfig


def build(**changes: object) -> GPT:
    torch.manual_seed(0)
    shape = {"vocab": 11, "context": 8, "layers": 2, "heads": 2, "width": 16}
    return GPT(GPTConfig(**{**shape, **changes}))


def test_parameters_are_those_of_nanogpt() -> None:
    """Per layer 12 width^2 and two gains; embeddings, positions and a last gain; head tied."""
    model = build()
    expected = 2 * (12 * 16**2 + 2 * 16) + 11 * 16 + 8 * 16 + 16
    assert sum(p.numel() for p in model.parameters()) == expected
    assert model.head.weight is model.tokens.weight


def test_initial_loss_is_that_of_a_uniform_guess() -> None:
    idx, targets = torch.randint(11, (2, 64, 8), generator=torch.Generator().manual_seed(1))
    _, loss = build()(idx, targets)
    assert loss.item() == pytest.approx(math.log(11), abs=0.05)


def test_logits_do_not_depend_on_later_tokens() -> None:
    idx = torch.randint(11, (1, 8), generator=torch.Generator().manual_seed(1))
    changed = idx.clone()
    changed[0, 5:] = (changed[0, 5:] + 1) % 11
    model = build()
    before, after = model(idx)[0], model(changed)[0]
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_generate_continues_prompts_shorter_and_longer_than_the_context() -> None:
    for prompt in (1, 8, 20):
        idx = torch.ones(2, prompt, dtype=torch.int64)
        out = build().eval().generate(idx, 10, generator=torch.Generator().manual_seed(0))
        assert out.shape == (2, prompt + 10)
        assert torch.equal(out[:, :prompt], idx)
        assert 0 <= int(out.min()) <= int(out.max()) < 11


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
