"""Networks on graphs, molecules and points."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .case import Case, Stranger, loss_inside, loss_outside

__all__ = ["STRANGERS"]

NODES, EDGES, FEATURES, CLASSES = 64, 256, 16, 10

Settings = dict[str, Any]


def _edges() -> Tensor:
    return torch.randint(NODES, (2, EDGES))


#: Class of torch_geometric.nn -> its settings.
GEOMETRIC: dict[str, Settings] = {
    "GCN": {},
    "GraphSAGE": {},
    "GIN": {"norm": "batch_norm"},
    "GAT": {"heads": 4, "v2": True},
    "EdgeCNN": {},
    "PNA": {
        "aggregators": ["mean", "max"],
        "scalers": ["identity"],
        "deg": torch.ones(16).long(),
    },
}


def _geometric(name: str, settings: Settings) -> Case:
    from torch_geometric import nn as layers

    sizes = {"hidden_channels": 64, "num_layers": 3, "out_channels": CLASSES}
    model = getattr(layers, name)(in_channels=FEATURES, **sizes, **settings)
    labels = torch.randint(CLASSES, (NODES,))
    case = loss_inside if name in ("GIN", "GAT", "PNA") else loss_outside
    return case(model, F.cross_entropy, labels, torch.randn(NODES, FEATURES), _edges())


class _Layers(nn.Module):
    """A stack of layers of torch_geometric with residual connections, as its examples have."""

    def __init__(self, make: Any, depth: int = 2, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, width)
        self.layers = nn.ModuleList(make(width) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.embed(x)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + layer(norm(x), edge_index).relu()
        return self.head(x)


#: Name of a layer of torch_geometric -> what makes it for a width.
LAYERS: dict[str, Any] = {
    "GENConv": lambda nn, width: nn.GENConv(width, width),
    "TransformerConv": lambda nn, width: nn.TransformerConv(width, width // 4, heads=4),
    "ResGatedGraphConv": lambda nn, width: nn.ResGatedGraphConv(width, width),
    "ChebConv": lambda nn, width: nn.ChebConv(width, width, K=3),
}


def _stack(name: str) -> Case:
    from torch_geometric import nn as layers

    model = _Layers(lambda width: LAYERS[name](layers, width))
    return Case(model, (torch.randn(NODES, FEATURES), _edges()))


def _sgformer() -> Case:
    from torch_geometric.nn.models import SGFormer

    model = SGFormer(FEATURES, 64, CLASSES, trans_num_layers=1, gnn_num_layers=2)
    batch = torch.zeros(NODES, dtype=torch.long)
    return Case(model, (torch.randn(NODES, FEATURES), _edges(), batch))


def _pairs(pos: Tensor, batch: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """All pairs of atoms within a molecule, and their distances."""
    same = (batch[:, None] == batch[None]) & ~torch.eye(len(batch), dtype=torch.bool)
    index = same.nonzero().T
    return index, (pos[index[0]] - pos[index[1]]).norm(dim=-1)


def _molecules() -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.randint(1, 9, (32,)),
        2 * torch.randn(32, 3),
        torch.arange(4).repeat_interleave(8),
    )


class _Pairs(nn.Module):
    def forward(self, pos: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        return _pairs(pos, batch)


def _schnet() -> Case:
    from torch_geometric.nn.models import SchNet

    sizes = {
        "hidden_channels": 32,
        "num_filters": 32,
        "num_interactions": 2,
        "num_gaussians": 16,
    }
    model = SchNet(**sizes, interaction_graph=_Pairs())
    return loss_outside(model, F.l1_loss, torch.randn(4, 1), *_molecules())


def _egnn() -> Case:
    from egnn_pytorch import EGNN_Network

    model = EGNN_Network(
        num_tokens=21, num_positions=32, dim=32, depth=2, num_nearest_neighbors=8
    )
    return Case(model, (torch.randint(21, (2, 32)), torch.randn(2, 32, 3)))


def _equivariant() -> Case:
    from e3nn import o3
    from e3nn.nn import Gate

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            gate = Gate("16x0e", [torch.relu], "8x0e", [torch.sigmoid], "8x1o")
            self.product = o3.FullyConnectedTensorProduct(
                "8x0e+8x1o", "1x0e+1x1o", gate.irreps_in
            )
            self.gate = gate
            self.head = o3.Linear(gate.irreps_out, "1x0e")

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.head(self.gate(self.product(x, y)))

    return Case(Network(), (torch.randn(64, 32), torch.randn(64, 4)))


STRANGERS = [
    *(
        Stranger(n, "torch_geometric", partial(_geometric, n, s))
        for n, s in GEOMETRIC.items()
    ),
    *(Stranger(f"{n} layers", "torch_geometric", partial(_stack, n)) for n in LAYERS),
    Stranger("SGFormer", "torch_geometric", _sgformer),
    Stranger("SchNet", "torch_geometric", _schnet),
    Stranger("EGNN_Network", "egnn-pytorch", _egnn),
    Stranger("Gate of a tensor product", "e3nn", _equivariant),
]
