"""What is measured: scales of tensors, and gradients lost to a format."""

import math

import pytest
import torch

from notebooks.nanogpt.gradients import flushed_share
from notebooks.nanogpt.model import GPT
from notebooks.nanogpt.scales import plot_scales, record_scales
from notebooks.nanogpt.settings import Settings
from notebooks.nanogpt.variants import VARIANTS, build_model

SETTINGS = Settings(layers=2, heads=2, width=32, context=16)


@pytest.fixture
def batch() -> torch.Tensor:
    return torch.randint(64, (2, 32, 16), generator=torch.Generator().manual_seed(0))


def test_every_tensor_once_with_its_gradient(batch: torch.Tensor) -> None:
    model = build_model("fp32", vocab=64, settings=SETTINGS, seed=0)
    scales = {scale.name: scale for scale in record_scales(model, *batch)}
    per_block = 9  # two norms, four linears, what enters two of those, and the sum between
    assert len(scales) == 2 + 1 + 2 * (per_block + 1) + 2 + len(list(model.parameters()))
    assert list(scales)[:3] == ["tokens", "positions", "blocks.0 (input)"]
    assert not any(math.isnan(scale.gradient) for scale in scales.values())
    expected = model.tokens.weight.square().mean().sqrt().item()
    assert scales["tokens.weight"].value == pytest.approx(expected)
    assert all(parameter.grad is None for parameter in model.parameters())
    model(*batch)  # no hook is left behind to keep tensors
    assert not model.head._forward_hooks


def test_gradients_are_those_of_autograd(batch: torch.Tensor) -> None:
    model = build_model("fp32", vocab=64, settings=SETTINGS, seed=0)
    scales = {scale.name: scale for scale in record_scales(model, *batch)}
    logits, loss = model(*batch)
    (grad,) = torch.autograd.grad(loss, logits)
    assert scales["head"].value == pytest.approx(logits.square().mean().sqrt().item())
    assert scales["head"].gradient == pytest.approx(grad.square().mean().sqrt().item())


def test_unit_scaling_puts_every_value_near_one(batch: torch.Tensor) -> None:
    model = build_model("unit_scaled_fp8", vocab=64, settings=SETTINGS, seed=0)
    for scale in record_scales(model, *batch):
        assert 2**-4 < scale.value < 2**4, scale


def test_picture_has_a_panel_per_model_and_a_row_per_tensor(batch: torch.Tensor) -> None:
    model = build_model("fp32", vocab=64, settings=SETTINGS, seed=0)
    scales = record_scales(model, *batch)
    panels = plot_scales({"a": scales, "b": scales}).axes
    assert [panel.get_title(loc="left") for panel in panels] == ["a", "b"]
    assert [label.get_text() for label in panels[0].get_yticklabels()] == [s.name for s in scales]


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
