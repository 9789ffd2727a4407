"""Gradients lost to a format."""

import math

import pytest
import torch

from notebooks.nanogpt.gradients import flushed_share
from notebooks.nanogpt.model import GPT
from notebooks.nanogpt.settings import Settings
from notebooks.nanogpt.variants import VARIANTS, build_model


class _OneLayer(torch.nn.Module):
    """A linear layer whose output has the gradients it is told to have."""

    def __init__(self, gradients: torch.Tensor) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, len(gradients))
        self.gradients = gradients


@pytest.mark.parametrize(
    ("gradients", "share"),
    [
        ([1.0, 2.0**-16, 0.0, 2.0**-14], 0.0),  # e5m2's smallest value is 2**-16
        ([1.0, 2.0**-17, 1e-30, 0.0], 2 / 3),  # the tie at half of it goes to zero
        ([0.0, 0.0, 0.0, 0.0], math.nan),
    ],
)
def test_flushed_share(gradients: list[float], share: float) -> None:
    model = _OneLayer(torch.tensor(gradients))

    class Training:
        def __init__(self) -> None:
            self.model = model
            self.optimizer = torch.optim.SGD(model.parameters())

        def example_loss(self) -> torch.Tensor:
            return (model.layer(torch.ones(1, 1)) * model.gradients).sum()

    assert flushed_share(Training()) == pytest.approx(share, nan_ok=True)
    assert model.layer.weight.grad is None


@pytest.mark.proves("unit-scaling", "FP8 loses accuracy, unit scaling regains it", how="own")
def test_plain_gradients_are_lost_and_unit_scaled_ones_are_kept(text_file) -> None:
    from notebooks.nanogpt.data import load_corpus
    from notebooks.nanogpt.train import Training

    corpus = load_corpus(str(text_file), context=16)
    settings = Settings(layers=2, heads=2, width=32, context=16, batch_size=64)
    shares = {}
    for variant in ("fp8", "unit_scaled_fp8"):
        model = build_model(variant, vocab=len(corpus.symbols), settings=settings, seed=0)
        assert isinstance(model, GPT)
        run = Training(model, corpus=corpus, settings=settings, lr=1.0)
        shares[variant] = flushed_share(run, VARIANTS[variant].scaled)
    assert shares["fp8"] > 0.05
    assert shares["unit_scaled_fp8"] < 0.005
