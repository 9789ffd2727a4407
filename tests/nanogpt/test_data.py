"""The data: tokens, the held-out end, examples, the embedded default."""

import torch

from notebooks.nanogpt.data import load_corpus, window_starts


def test_characters_round_trip_and_the_last_tenth_is_held_out(tmp_path):
    text = "na\u00efve \u2192 fox\r\n" * 100
    (tmp_path / "t.txt").write_text(text, encoding="utf-8", newline="")
    corpus = load_corpus(str(tmp_path / "t.txt"), context=8)
    assert corpus.decode(torch.cat([corpus.train, corpus.val])) == text
    assert len(corpus.val) == len(text) // 10
    assert len(corpus.symbols) == len(set(text))


def test_starts_reach_both_ends_and_depend_on_the_seed_only():
    tokens = torch.arange(20)
    starts = window_starts(tokens, (1000,), context=16, seed=3)
    assert set(starts.tolist()) == {0, 1, 2, 3}
    torch.manual_seed(99)
    assert torch.equal(starts, window_starts(tokens, (1000,), context=16, seed=3))
    assert not torch.equal(starts, window_starts(tokens, (1000,), context=16, seed=4))
