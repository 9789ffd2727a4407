"""What `verify` and `track_scales` measure under `torch.func`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import unit_scaling as uu
from unit_scaling.transforms import track_scales, unit_scale

X = torch.linspace(-2, 2, 64 * 32).reshape(64, 32).sin()


class Mapped(nn.Module):
    """Two layers; ``apply`` is what is done with the function that they are."""

    def __init__(self, apply: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.apply_to, self.first, self.second = apply, nn.Linear(32, 16), nn.Linear(16, 8)

    def inner(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.apply_to(self.inner, x)


def straight(f: Any, x: Tensor) -> Tensor:
    return f(x)


def mapped(f: Any, x: Tensor) -> Tensor:
    return vmap(f)(x)


def differentiated(f: Any, x: Tensor) -> Tensor:
    return grad(lambda z: f(z).square().sum())(x)


def test_calls_inside_of_vmap_are_measured_as_outside() -> None:
    """Over all that it maps, forward and backward; a note says so."""
    found = [uu.verify(Mapped(way), X) for way in (straight, mapped)]
    for one, other in zip(*found, strict=True):
        assert (one.path, one.call, one.tensor) == (other.path, other.call, other.tensor)
        assert one.rms == pytest.approx(other.rms, rel=1e-5)
    assert not found[0].notes
    assert "linear in first runs under a transform of torch.func" in found[1].notes[0]


class Ensemble(nn.Module):
    """Members of an ensemble, mapped over their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weights, self.last = nn.Parameter(torch.randn(3, 32, 32)), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(vmap(lambda w: torch.tanh(x @ w.mT))(self.weights).mean(0))


def test_weights_that_are_mapped_over_are_weights() -> None:
    torch.manual_seed(0)
    rows = [row for row in uu.verify(Ensemble(), X) if row.call == "matmul"]
    assert [row.tensor for row in rows if row.kind == "weight"] == ["weight"]
    assert "weight gradient" in {row.kind for row in rows}


def test_calls_inside_of_grad_are_measured_by_the_outer_gradient() -> None:
    rows = uu.verify(unit_scale(Mapped(differentiated)), X)
    assert {row.path for row in rows} == {"first", "second"}
    assert all(row.rms > 0 for row in rows)
    assert rows.notes


def adapted(f: Any, x: Tensor) -> Tensor:
    layer = f.__self__.first
    weights = dict(layer.named_parameters())
    steps = grad(lambda w: functional_call(layer, w, (x,)).square().mean())(weights)
    return functional_call(layer, {k: weights[k] - steps[k] for k in weights}, (x,))


@pytest.mark.parametrize("way", [mapped, differentiated, adapted])
def test_track_scales_measures_inside_of_transforms(way: Any) -> None:
    model = track_scales(Mapped(way))
    model(X).sum().backward()
    found = [node.meta.get("metrics") for node in model.scales_graph().nodes]
    assert all(m.fwd.rms > 0 for m in found if m is not None)


def test_track_scales_measures_the_same_inside_of_vmap() -> None:
    measured = []
    for way in (straight, mapped):
        model = track_scales(Mapped(way))
        model(X).sum().backward()
        named = {n.name: n.meta["metrics"] for n in model.scales_graph().nodes if "tanh" in n.name}
        (metrics,) = named.values()
        measured.append((metrics.fwd.rms, metrics.bwd.rms))
    assert measured[0] == pytest.approx(measured[1], rel=1e-5)


def test_products_inside_of_calls_are_noted() -> None:
    model = nn.Linear(32, 8)

    class Distances(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = model

        def forward(self, x: Tensor) -> Tensor:
            return torch.cdist(self.layer(x), self.layer.weight.mT[:, :8])

    (note,) = uu.verify(Distances(), X).notes
    assert note.startswith("cdist in the model itself is not measured: the distance")
