"""Modules whose classes have an abstract or a generic class as first base."""

from __future__ import annotations

import copy
import pickle
from abc import ABC
from typing import Generic, TypeVar

import pytest
import torch
from torch import Tensor, nn

import fp8
from unit_scaling.transforms import simulate_fp8, unit_scale

T = TypeVar("T")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).relu()


class Abstract(ABC, Net):
    pass


class Typed(Generic[T], Net):
    pass


@pytest.mark.parametrize("cls", [Abstract, Typed])
def test_a_class_whose_first_base_is_no_module(cls: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = cls(), torch.randn(8, 16)
    ours = simulate_fp8(unit_scale(model))
    assert isinstance(ours, cls)
    for each in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert torch.equal(each(x), ours(x))
    converted = fp8.convert(cls(), "tensor")
    assert not torch.equal(fp8.revert(copy.deepcopy(converted))(x), converted(x))
