"""One run: schedule, optimizer, gradients that a format loses."""

import dataclasses
import math

import pytest
import torch

import unit_scaling as uu
from notebooks.nanogpt.data import load_corpus
from notebooks.nanogpt.gradients import flushed_share
from notebooks.nanogpt.settings import Settings
from notebooks.nanogpt.train import Training, learning_rate, make_optimizer
from notebooks.nanogpt.variants import VARIANTS, build_model
from tests.shared import proves

SETTINGS = Settings(
    layers=1, heads=2, width=16, context=16, batch_size=4, iters=12, warmup=2, dropout=0.3,
    eval_interval=4, eval_batches=2,
)  # fmt: skip


@pytest.fixture
def training(text_file):
    def build(variant="fp32", settings=SETTINGS):
        corpus = load_corpus(str(text_file), context=16)
        model = build_model(
            variant, vocab=len(corpus.symbols), settings=settings, seed=0
        )
        return Training(model, lr=1e-2, corpus=corpus, settings=settings, seed=0)

    return build


def test_the_schedule():
    """Warm-up to the peak, then a cosine to its final share."""
    settings = Settings(iters=1000, warmup=100, final_lr=0.1)
    rates = [learning_rate(step, settings) for step in range(1001)]
    assert rates[0] == pytest.approx(0.01)
    assert max(rates) == rates[99] == rates[100] == 1.0
    assert rates[550] == pytest.approx(0.55)
    assert rates[1000] == pytest.approx(0.1)
    assert rates[100:] == sorted(rates[100:], reverse=True)


def test_unit_scaled_models_have_the_optimizer_that_the_readme_recommends(training):
    """With the smaller rate for gains, and the decay of a step that the plain model has."""
    run = training("unit_scaled")
    optimizer = make_optimizer(run.model, SETTINGS.unit_lr, SETTINGS)
    assert type(optimizer) is uu.optim.AdamW
    assert {group["lr"] for group in optimizer.param_groups} == {uu.optim.RATES["adam"]}
    decays = {round(group["weight_decay"], 9) for group in optimizer.param_groups}
    assert decays == {0.0, round(SETTINGS.weight_decay * SETTINGS.lr, 9)}
    settings = dataclasses.replace(SETTINGS, optimizer="fp8")
    other = make_optimizer(run.model, SETTINGS.unit_lr, settings)
    scales = {
        scale for group in optimizer.param_groups for scale in group["mup_lr_scales"]
    }
    assert {g["mup_lr_scale"] for g in other.param_groups} == scales
    assert type(training().optimizer) is torch.optim.AdamW


@pytest.mark.parametrize(
    ("gradients", "share"),
    [
        ([1.0, 2.0**-16, 0.0, 2.0**-14], 0.0),  # e5m2's smallest value is 2**-16
        ([1.0, 2.0**-17, 1e-30, 0.0], 2 / 3),  # the tie at half of it goes to zero
        ([0.0, 0.0, 0.0, 0.0], math.nan),
    ],
)
def test_the_share_of_gradients_that_a_format_flushes(gradients, share):
    """Those at the output of a layer that has just these."""
    model = torch.nn.Sequential(torch.nn.Linear(1, 4))

    class Run:
        optimizer = torch.optim.SGD(model.parameters())

        def example_loss(self):
            return (model(torch.ones(1, 1)) * torch.tensor(gradients)).sum()

    run = Run()
    run.model = model
    assert flushed_share(run) == pytest.approx(share, nan_ok=True)
    assert model[0].weight.grad is None


@proves("unit-scaling", "FP8 loses accuracy, unit scaling regains it")
def test_scales_and_unit_scaling_keep_what_fp8_without_scales_loses(training):
    """With scales the gradients are near those of the plain model."""
    settings = dataclasses.replace(
        SETTINGS, layers=2, width=32, batch_size=64, dropout=0.0
    )
    names = ("fp32", "fp8", "fp8_tensor", "fp8_static", "unit_scaled_fp8")
    runs = {name: training(name, settings) for name in names}
    for run in runs.values():
        run.example_loss().backward()
    exact, *cast = (
        run.model.blocks[0].mlp.up.weight.grad for run in list(runs.values())[:4]
    )
    without, *scaled = (((grad - exact).norm() / exact.norm()).item() for grad in cast)
    assert without > 0.1
    assert all(0 < error < 0.1 for error in scaled)
    shares = {
        name: flushed_share(run, VARIANTS[name].scaled) for name, run in runs.items()
    }
    assert shares["fp8"] > 0.05
    assert max(shares[name] for name in names[2:]) < 0.01
