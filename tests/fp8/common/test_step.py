"""What surrounds a step of a user's model leaves the model as it was."""

import pytest
from torch import nn

from fp8.common.step import evaluating


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
