"""Networks on graphs, molecules and points."""

from __future__ import annotations

import torch

from .case import Case, Stranger

__all__ = ["STRANGERS"]

NODES, EDGES = 64, 256


def _gcn() -> Case:
    from torch_geometric.nn import GCN

    model = GCN(in_channels=16, hidden_channels=64, num_layers=3, out_channels=10)
    return Case(model, (torch.randn(NODES, 16), torch.randint(NODES, (2, EDGES))))


STRANGERS = [Stranger("GCN", "torch_geometric", _gcn)]
