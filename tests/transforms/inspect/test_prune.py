"""Graphs of `track_scales` without the nodes that say nothing."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, symbolic_trace
from torch.nn import functional as F

from tests.transforms.inspect.test_track_scales import meta
from unit_scaling.transforms import (
    prune_non_float_tensors,
    prune_same_scale_tensors,
    prune_selected_nodes,
    track_scales,
)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.linear = nn.Embedding(1024, 64), nn.Linear(64, 64)

    def forward(self, idxs: Tensor) -> tuple[Tensor, Tensor]:
        x = self.emb(idxs)
        scores = F.softmax(self.linear(x), dim=-1)
        top = torch.unsqueeze(torch.argmax(scores, dim=-1), -1)
        found = torch.gather(x, -1, top)
        found -= x.mean()
        return found, top


def targets(graph: Graph) -> set[Any]:
    return set(meta(graph))


def test_prune_non_float_tensors():
    torch.manual_seed(0)
    model = track_scales(Words())
    model(torch.randint(0, 1024, (8, 32)))
    graph = model.scales_graph()
    integers = {"idxs", torch.argmax, torch.unsqueeze}
    floats = {
        "self_modules_emb_parameters_weight", F.embedding, "self_modules_linear_parameters_weight",
        "self_modules_linear_parameters_bias", F.linear, F.softmax, torch.gather, operator.isub,
        "mean", "output",
    }  # fmt: skip
    assert targets(graph) == integers | floats
    assert targets(prune_non_float_tensors(graph)) == floats
    assert targets(graph) == integers | floats  # a copy


def test_prune_same_scale_tensors():
    class Shapes(nn.Module):
        def forward(self, a: Tensor) -> Tensor:
            b = a / 1.0
            c = b * 1.0  # the gradient of b is that of c and of d
            d = F.relu(c)
            x, y = (b - d).view(-1, 2).unbind(-1)
            return torch.stack([x, y]).flatten().sum()

    torch.manual_seed(0)
    model = track_scales(Shapes())
    loss = model(torch.randn(64, 256))
    forward = prune_same_scale_tensors(prune_non_float_tensors(model.scales_graph()))
    kept = {"a", F.relu, operator.sub, operator.getitem, torch.stack, "sum_1", "output"}
    assert targets(forward) == kept
    loss.backward()
    both = prune_same_scale_tensors(model.scales_graph())
    assert targets(both) == kept | {operator.mul, "unbind"}
    loose = prune_same_scale_tensors(forward, rtol=0.05)
    assert operator.getitem not in targets(loose)
    stacks = [n for n in loose.nodes if n.target is torch.stack]
    assert all(source.target is operator.sub for n in stacks for source in n.all_input_nodes)


def test_prune_selected_nodes():
    class Chain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.abs(F.relu(x + 1)).sum()

    model = track_scales(Chain())
    model(torch.randn(4, 4))
    graph = prune_selected_nodes(model.scales_graph(), [torch.abs, F.relu])
    assert targets(graph) == {"x", operator.add, "sum_1", "output"}
    assert next(n for n in graph.nodes if n.name == "sum_1").args[0].target is operator.add
    assert targets(prune_selected_nodes(graph, ["sum"])) == {"x", operator.add, "output"}


def test_graphs_of_another_origin_are_refused():
    for prune in (prune_non_float_tensors, prune_same_scale_tensors):
        with pytest.raises(ValueError, match="not one of track_scales"):
            prune(symbolic_trace(nn.Linear(2, 2)).graph)
    for prune in (prune_non_float_tensors, prune_same_scale_tensors):
        with pytest.raises(TypeError, match=r"graph is a torch\.fx\.Graph, .* got Linear"):
            prune(nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"graph is a torch\.fx\.Graph, .* got Linear"):
        prune_selected_nodes(nn.Linear(2, 2), [])  # type: ignore[arg-type]
