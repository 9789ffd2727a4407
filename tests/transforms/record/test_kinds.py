"""The table of added arguments against torch's own schemas."""

import pytest
import torch

from unit_scaling.transforms.record.kinds import ADDED, LAYERS, PRODUCTS, is_added

SAME = {"linear_readout": "linear"}
"""Kinds without a function in torch -> the one with the same arguments."""


def arguments(kind):
    """The names of the arguments of a function of torch."""
    operator = getattr(torch.ops.aten, SAME.get(kind, kind))
    schema = getattr(operator, operator.overloads()[0])._schema
    return [argument.name.replace("self", "input") for argument in schema.arguments]


@pytest.mark.parametrize("kind", sorted(ADDED))
def test_added_arguments_are_those_of_torch(kind):
    names, (position, added) = arguments(kind), ADDED[kind]
    assert names[position] == added
    slots = [(at,) for at in range(len(names))] + [(name,) for name in names]
    assert [slot for slot in slots if is_added(kind, slot)] == [(position,), (added,)]


def test_every_product_with_a_bias_is_listed():
    """Except grouped_mm, which has one in torch's signature and refuses it."""
    with_bias = {
        kind for kind in PRODUCTS - {"grouped_mm"} if "bias" in arguments(kind)
    }
    assert with_bias == {kind for kind, (_, added) in ADDED.items() if added == "bias"}
    assert with_bias >= LAYERS
    assert ADDED.keys() <= PRODUCTS
