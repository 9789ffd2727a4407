"""Losses: torch's value to the bit, and the gradient of the sum over the examples, scaled."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import unit_scaling.functional as U

X = torch.linspace(-2, 2, 24, dtype=torch.float64).reshape(4, 6)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def gradient(loss: Tensor, x: Tensor) -> Tensor:
    (grad,) = torch.autograd.grad(loss, x)
    return grad


GENERATOR = torch.Generator().manual_seed(0)
LOGITS = torch.randn(12, 7, dtype=torch.float64, generator=GENERATOR)
CLASSES = torch.randint(7, (12,), generator=GENERATOR)
RULE = 7 / 6**0.5

LOSSES = {
    "plain": (LOGITS, CLASSES, {}),
    "ignored": (LOGITS, torch.where(torch.arange(12) % 4 > 0, -100, CLASSES), {}),
    "ignore_index": (LOGITS, CLASSES, {"ignore_index": int(CLASSES[0])}),
    "weight": (LOGITS, CLASSES, {"weight": torch.linspace(0.1, 2, 7).double()}),
    "smoothing": (LOGITS, CLASSES, {"label_smoothing": 0.1}),
    "smoothing, weight, ignored": (
        LOGITS,
        torch.where(torch.arange(12) % 4 > 0, -100, CLASSES),
        {"label_smoothing": 0.1, "weight": torch.linspace(0.1, 2, 7).double()},
    ),
    "probabilities": (LOGITS, torch.softmax(LOGITS.flip(0), 1), {}),
    "pixels": (LOGITS.reshape(2, 7, 2, 3), CLASSES.reshape(2, 2, 3), {}),
    "one": (LOGITS[0], CLASSES[0], {}),
    "legacy sum": (LOGITS, CLASSES, {"size_average": False}),
    "legacy none": (LOGITS, CLASSES, {"reduce": False}),
}


@pytest.mark.proves("unit-scaling", "losses", how="own")
@pytest.mark.filterwarnings("ignore:size_average and reduce args will be deprecated")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("case", LOSSES)
def test_cross_entropy(case: str, reduction: str):
    """The value is torch's to the bit; the gradient is the sum's, times the rule."""
    logits, target, settings = LOSSES[case]
    x = logits.clone().requires_grad_()
    loss = U.cross_entropy(x, target, reduction=reduction, **settings)
    assert torch.equal(loss, F.cross_entropy(logits, target, reduction=reduction, **settings))
    plain = logits.clone().requires_grad_()
    settings = {k: v for k, v in settings.items() if k not in ("size_average", "reduce")}
    total = F.cross_entropy(plain, target, reduction="sum", **settings)
    rule = RULE / (1 - settings.get("label_smoothing", 0))
    torch.testing.assert_close(gradient(loss.sum(), x), gradient(total, plain) * rule)


def test_cross_entropy_ignores_tokens_in_value_and_gradient():
    """Three quarters ignored: the counted tokens have the loss and gradient they have alone."""
    keep = torch.arange(12) % 4 == 0
    target = torch.where(keep, CLASSES, -100)
    x, alone = LOGITS.clone().requires_grad_(), LOGITS[keep].clone().requires_grad_()
    loss, expected = U.cross_entropy(x, target), U.cross_entropy(alone, CLASSES[keep])
    torch.testing.assert_close(loss, expected)
    grad = gradient(loss, x)
    torch.testing.assert_close(grad[keep], gradient(expected, alone))
    assert not grad[~keep].any()


def test_cross_entropy_mult():
    x = LOGITS.clone().requires_grad_()
    plain = LOGITS.clone().requires_grad_()
    loss, total = U.cross_entropy(x, CLASSES, mult=2.0), F.cross_entropy(2 * plain, CLASSES)
    assert torch.equal(loss, total)
    torch.testing.assert_close(gradient(loss, x), gradient(total, plain) * RULE * 12 / 2)


@pytest.mark.parametrize("f", [U.cross_entropy, U.mse_loss], ids=lambda f: f.__name__)
def test_unknown_reduction(f):
    with pytest.raises(ValueError, match="unknown reduction 'max'; choose one of 'mean'"):
        f(LOGITS, LOGITS, reduction="max")


def test_cross_entropy_gradient_of_many_tokens_in_half_precision():
    """A gradient divided by 2**14 tokens would lose most of float16's bits: this one does not."""
    x = torch.zeros(2**14, 65, dtype=torch.float16, requires_grad=True)
    grad = gradient(U.cross_entropy(x, torch.randint(65, (2**14,))), x)
    assert grad.float().square().mean().sqrt().item() == pytest.approx(1, rel=2**-8)


@pytest.mark.proves("unit-scaling", "losses", how="own")
@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(4, 6), (6,), (1, 6)], ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_mse_loss(reduction: str, shape: tuple[int, ...], weighted: bool):
    settings = {"weight": torch.rand(4, 6).double()} if weighted else {}
    if weighted and shape != (4, 6):
        pytest.skip("torch wants one shape for all three")
    target = torch.randn(shape).double()
    x, plain = X.clone().requires_grad_(), X.clone().requires_grad_()
    loss = U.mse_loss(x, target, reduction=reduction, **settings)
    expected = F.mse_loss(plain, target, reduction=reduction, **settings)
    assert torch.equal(loss, expected)
    total = F.mse_loss(plain, target, reduction="sum", **settings)
    torch.testing.assert_close(gradient(loss.sum(), x), gradient(total, plain) * 8**-0.5)
