"""Losses: torch's value to the bit, and the gradient of the sum over the examples, scaled."""

import pytest
import torch
from torch.nn import functional as F

import unit_scaling.functional as U
from tests.shared import (
    assert_close,
    filterwarnings,
    normals,
    parametrize,
    proves,
    refuses,
    rms,
)
from unit_scaling.rules.table import OPS, find_op

normal = normals(0)


X, Y, LOGITS = normal(4, 6), normal(4, 6), normal(12, 7)
P, Q = X.softmax(-1), Y.softmax(-1)
CLASSES = torch.tensor([0, 5, 2, 2])
TOKENS = torch.arange(12) * 5 % 7
COUNTED = torch.arange(12) % 4 == 0
SOME = torch.where(COUNTED, TOKENS, -100)
WEIGHT = torch.linspace(0.1, 2, 7).double()

LOSSES = [  # (torch's function, arguments, settings)
    (F.cross_entropy, (LOGITS, SOME), {}),
    (F.cross_entropy, (LOGITS, TOKENS), {"ignore_index": int(TOKENS[0])}),
    (F.cross_entropy, (LOGITS, TOKENS), {"weight": WEIGHT}),
    (F.cross_entropy, (LOGITS, SOME), {"label_smoothing": 0.1, "weight": WEIGHT}),
    (F.cross_entropy, (LOGITS, torch.softmax(LOGITS.flip(0), 1)), {}),
    (F.cross_entropy, (LOGITS.reshape(2, 7, 2, 3), TOKENS.reshape(2, 2, 3)), {}),
    (F.cross_entropy, (LOGITS[0], TOKENS[0]), {}),
    (F.nll_loss, (P.log(), CLASSES), {"ignore_index": 2}),
    (F.nll_loss, (P.log(), CLASSES), {"weight": WEIGHT[1:]}),
    (F.nll_loss, (P.log().reshape(2, 6, 2), CLASSES.reshape(2, 2)), {}),
    *((F.mse_loss, (X, target), {}) for target in (Y, Y[0], Y[:1])),
    (F.mse_loss, (X, Y), {"weight": P}),
    (F.l1_loss, (X, Y), {"weight": P}),
    (F.smooth_l1_loss, (X, Y), {"beta": 0.3}),
    (F.smooth_l1_loss, (X, Y), {"beta": 0.0}),
    (F.huber_loss, (X, Y), {"delta": 2.0}),
    (F.binary_cross_entropy_with_logits, (X, P), {"pos_weight": Q[0]}),
    (F.binary_cross_entropy, (P, Q), {"weight": Q}),
    (F.kl_div, (P.log(), Q.log()), {"log_target": True}),
]


@proves("unit-scaling", "losses")
@filterwarnings("ignore:reduction. 'mean' divides")
@filterwarnings("ignore:Using a target size")
@parametrize("reduction", "mean sum none batchmean".split())
@parametrize("case", LOSSES, ids=lambda c: f"{c[0].__name__} {[*c[2]]}")
def test_loss(case, reduction):
    """The value is torch's to the bit; the gradient is the sum's, times the rule."""
    plain, args, settings = case
    op = find_op(plain)
    if reduction == "batchmean" and op.name != "kl_div":
        with refuses("unknown reduction 'batchmean'; choose one of"):
            op.call(args, {**settings, "reduction": reduction})
        return
    ours, theirs = args[0].clone().requires_grad_(), args[0].clone().requires_grad_()
    loss = op.call((ours, *args[1:]), {**settings, "reduction": reduction})
    assert torch.equal(loss, plain(*args, **settings, reduction=reduction))
    total = plain(theirs, *args[1:], **settings, reduction="sum")
    (grad,) = torch.autograd.grad(loss.sum(), ours)
    (expected,) = torch.autograd.grad(total, theirs)
    scales = op.scales(args, settings)
    assert_close(grad, expected * list(scales.values())[1])


def test_rules_of_losses():
    """That of uniform probabilities: the gradient 1/V - onehot has RMS sqrt(V - 1)/V."""
    assert OPS["cross_entropy"].rule(LOGITS, 0.2)["input"] == pytest.approx(
        7 / 6**0.5 / 0.8
    )
    assert OPS["mse_loss"].rule(X, Y)["input"] == pytest.approx(8**-0.5)


@filterwarnings("ignore:Using a target size")
def test_broadcast_target_collects_gradients():
    y = Y[:1].clone().requires_grad_()
    U.l1_loss(X, y, reduction="sum").backward()
    assert_close(y.grad, (y.detach() - X).sign().sum(0, keepdim=True) / 2)


def test_cross_entropy_ignores_tokens_in_value_and_gradient():
    """Three quarters ignored: the counted tokens have the loss and gradient they have alone."""
    x, alone = LOGITS.clone().requires_grad_(), LOGITS[COUNTED].clone().requires_grad_()
    loss, expected = U.cross_entropy(x, SOME), U.cross_entropy(alone, TOKENS[COUNTED])
    assert_close(loss, expected)
    (grad,), (of_counted,) = (
        torch.autograd.grad(loss, x),
        torch.autograd.grad(expected, alone),
    )
    assert_close(grad[COUNTED], of_counted)
    assert not grad[~COUNTED].any()


def test_cross_entropy_gradient_of_many_tokens_in_half_precision():
    """A gradient divided by 2**14 tokens would lose most of float16's bits: this one does not."""
    x = torch.zeros(2**14, 65, dtype=torch.float16, requires_grad=True)
    target = torch.randint(65, (2**14,))
    (grad,) = torch.autograd.grad(U.cross_entropy(x, target), x)
    assert rms(grad) == pytest.approx(1, rel=2**-8)
