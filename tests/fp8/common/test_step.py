"""What surrounds a step of a user's model leaves the model as it was."""

import pytest
import torch
from torch import nn

from fp8.common.step import evaluating, find_loss


class Merged(nn.Linear):
    """A layer that does more than set a flag when its mode changes, as some adapters do."""

    def train(self, mode=True):
        self.merged = not mode
        return super().train(mode)


def test_each_module_has_its_own_mode_again():
    """Also of two models that share a module, and after an error."""
    frozen, shared = nn.BatchNorm1d(4).eval(), nn.Linear(4, 4)
    one = nn.Sequential(Merged(4, 4), frozen, nn.Sequential(shared))
    other = nn.Sequential(shared, nn.Dropout()).eval()
    shared.train()
    modules = [*one.modules(), *other.modules()]
    before = [module.training for module in modules]

    def fails():
        with evaluating(one, other):
            assert not any(module.training for module in modules)
            assert one[0].merged
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert [module.training for module in modules] == before
    assert not one[0].merged


RESULTS = {
    "the loss alone": (lambda logits, loss, aux: loss, True),
    "logits, loss": (lambda logits, loss, aux: (logits, loss), True),
    "loss, probabilities": (lambda logits, loss, aux: (loss, logits.softmax(-1)), True),
    "loss of two, both, logits": (
        lambda logits, loss, aux: (loss + aux, loss, aux, logits),
        True,
    ),
    "loss by name": (
        lambda logits, loss, aux: {"aux": aux, "loss": loss, "logits": logits},
        True,
    ),
    "logits, auxiliary loss": (lambda logits, loss, aux: (logits, aux), False),
    "auxiliary losses, logits": (
        lambda logits, loss, aux: {"a": aux, "b": 2 * aux, "y": logits},
        False,
    ),
}


@pytest.mark.parametrize("name", RESULTS)
def test_a_loss_trains_all_that_the_results_are_computed_from(name):
    """An auxiliary loss, of a router for example, does not: the user adds it to the loss."""
    router, head = nn.Linear(4, 4), nn.Linear(4, 3)
    weights = router(torch.randn(8, 4)).softmax(-1)
    logits = head(weights)
    make, is_loss = RESULTS[name]
    loss = find_loss(make(logits, logits.logsumexp(-1).mean(), weights.square().sum()))
    assert (loss is not None) == is_loss
