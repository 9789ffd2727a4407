"""Modules whose classes have an abstract or a generic class as first base."""

from abc import ABC
from copy import deepcopy
from typing import Generic, TypeVar

import torch
from torch import nn

import fp8
from fp8.common.mixin import Mixin, add_mixin, own_attributes
from tests.shared import parametrize, pickled
from unit_scaling.transforms import simulate_fp8, unit_scale

T = TypeVar("T")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x):
        return self.layer(x).relu()


class Abstract(ABC, Net):
    pass


class Typed(Generic[T], Net):
    pass


@parametrize("cls", [Abstract, Typed])
def test_a_class_whose_first_base_is_no_module(cls):
    model, x = cls(), torch.randn(8, 16)
    ours = simulate_fp8(unit_scale(model))
    assert isinstance(ours, cls)
    for each in (deepcopy(ours), pickled(ours)):
        assert torch.equal(each(x), ours(x))
    converted = fp8.convert(cls(), "tensor")
    assert not torch.equal(fp8.revert(deepcopy(converted))(x), converted(x))


class First(Mixin):
    _attributes = ("first",)


class Second(Mixin):
    _attributes = ("second",)


class Copied(nn.Linear):
    def __deepcopy__(self, memo):
        return Copied(self.in_features, self.out_features)


@parametrize("mixins", [(First, Second), (Second, First)])
def test_attributes_of_all_mixins_are_copied(mixins):
    """Also by a class that copies itself, and none of them is one of the user's."""
    layer = Copied(2, 2)
    for mixin in mixins:
        add_mixin(layer, mixin)
    vars(layer).update(first=[1], second=[2], third=[3])
    made = deepcopy(layer)
    assert {name: vars(made).get(name) for name in ("first", "second")} == {
        "first": [1],
        "second": [2],
    }
    assert made.first is not layer.first
    assert isinstance(made, First)
    assert isinstance(made, Second)
    assert {"first", "second", "third"} & own_attributes(layer).keys() == {"third"}
