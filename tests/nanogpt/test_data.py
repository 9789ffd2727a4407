"""The data: tokens, the held-out end, examples, the embedded default."""

from pathlib import Path

import pytest
import torch

from notebooks.nanogpt.data import load_corpus, window_starts, windows


def test_characters_round_trip_and_the_last_tenth_is_held_out(tmp_path: Path) -> None:
    text = "na\u00efve \u2192 fox\r\n" * 100
    (tmp_path / "t.txt").write_text(text, encoding="utf-8", newline="")
    corpus = load_corpus(str(tmp_path / "t.txt"), context=8)
    assert corpus.decode(torch.cat([corpus.train, corpus.val])) == text
    assert len(corpus.val) == len(text) // 10
    assert len(corpus.symbols) == len(set(text))


def test_targets_are_the_next_tokens() -> None:
    idx, targets = windows(torch.arange(100), torch.tensor([0, 93]), context=6)
    assert idx.tolist() == [[0, 1, 2, 3, 4, 5], [93, 94, 95, 96, 97, 98]]
    assert torch.equal(targets, idx + 1)


def test_starts_reach_both_ends_and_depend_on_the_seed_only() -> None:
    tokens = torch.arange(20)
    starts = window_starts(tokens, (1000,), context=16, seed=3)
    assert set(starts.tolist()) == {0, 1, 2, 3}
    torch.manual_seed(99)
    assert torch.equal(starts, window_starts(tokens, (1000,), context=16, seed=3))
    assert not torch.equal(starts, window_starts(tokens, (1000,), context=16, seed=4))


def test_shortest_possible_text(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_text("x" * 170)
    assert len(load_corpus(str(path), context=16).val) == 17
    path.write_text("x" * 169)
    with pytest.raises(
        ValueError, match=r"t.txt is too short: 169 tokens, a context of 16 needs 170"
    ):
        load_corpus(str(path), context=16)
