"""Positions that a stream begins with and of which none is read at its end.

An image classifier joins a class token to its patches and reads that token only. The loss depends
on the patches through attention branches alone, each of which hands back the gradient times its
weight: what arrives at the patches has an RMS of about sqrt(sum tau^2) over these branches, where
the stream's is 1. The edge where they join is a cut edge (Unit Scaling, section 3).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .calls import SELECTIONS
from .flow import Flow
from .record import Node, Slot, replaced, tensors_in
from .residuals import Residuals
from .steps import Scaling

__all__ = ["unread_parts"]


def unread_parts(flow: Flow, bridges: list[bool], residuals: Residuals) -> dict[int, list[Scaling]]:
    """Call that joins a stream -> factors for the gradients of what is not read at its end."""
    after = {skip: add for add, skip in residuals.skips.items()}
    found = {}
    for index, node in enumerate(flow.nodes):
        if node.kind != "cat" or not bridges[index]:
            continue
        end, share = _end(flow, residuals, after, index)
        if not 0 < share < 1:
            continue
        read = _parts_read(flow, index, end)
        values = [(n, i) for n, i in enumerate(node.inputs) if i.node in flow.sources[index]]
        found[index] = [(i.slot, 1.0, 1 / share) for n, i in values if n not in read]
    return found


def _end(flow: Flow, residuals: Residuals, after: dict[int, int], start: int) -> tuple[int, float]:
    """(the end of a stream of which parts are read, the share of the gradient that its attention
    hands back to the other parts); the share is 0 for any other stream.
    """
    at, share = start, 0.0
    while flow.nodes[at].numel == flow.nodes[start].numel:  # it may be turned about meanwhile
        readers = flow.readers[at]
        if at in after:
            at = after[at]
            share = math.hypot(share, residuals.attended[at])
        elif readers and all(flow.nodes[r].kind in SELECTIONS for r in readers):
            return at, share if flow.nodes[at].shape == flow.nodes[start].shape else 0.0
        elif len(readers) == 1 and not flow.is_product(readers[0]):
            at = readers[0]
        else:
            break
    return at, 0.0


def _parts_read(flow: Flow, joined: int, end: int) -> set[int]:
    """Which of the tensors that a call joins are read where the stream ends: both calls are made
    with the tensors' numbers in the place of their values.
    """
    node = flow.nodes[joined]
    given = (*tensors_in(node.args), *tensors_in(node.kwargs))
    numbers = {slot: torch.full(t.shape, n) for n, (slot, t) in enumerate(given)}
    whole = _call(node, numbers)
    readers = [flow.nodes[reader] for reader in flow.readers[end]]
    read = [_call(r, {i.slot: whole for i in r.inputs if i.node == end}) for r in readers]
    return {int(n) for part in read for n in part.unique()}


def _call(node: Node, values: dict[Slot, Tensor]) -> Tensor:
    assert node.function is not None
    result: Tensor = node.function(*replaced(node.args, values), **replaced(node.kwargs, values))
    return result
