"""What `verify` and `track_scales` measure under `torch.func` and of recurrent layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap

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


def test_calls_inside_of_grad_are_measured_by_the_outer_gradient() -> None:
    rows = uu.verify(unit_scale(Mapped(differentiated)), X)
    assert {row.path for row in rows} == {"first", "second"}
    assert all(row.rms > 0 for row in rows)
    assert rows.notes


@pytest.mark.parametrize("way", [mapped, differentiated])
def test_track_scales_measures_inside_of_transforms(way: Any) -> None:
    model = track_scales(Mapped(way))
    model(X).sum().backward()
    found = [node.meta.get("metrics") for node in model.scales_graph().nodes]
    assert all(m.fwd.rms > 0 for m in found if m is not None)


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


@pytest.mark.parametrize("layer", [nn.LSTM(4, 4), uu.LSTM(4, 4), uu.GRU(4, 4)])
def test_recurrent_layers_are_measured_from_outside(layer: nn.Module):
    """Input, weights and output; not states, which begin at zero, nor biases. A note says so."""
    result = uu.verify(layer, torch.randn(3, 2, 4), loss=lambda out: out[0].sum())
    tensors = ["input", *["weight", "gradient of weight"] * 2, "output", "gradient of output"]
    assert [row.tensor for row in result] == tensors
    (note,) = result.notes
    assert note.endswith("in the model itself: its steps are one call, not measured inside")


@pytest.mark.parametrize("einsum", [torch.einsum, uu.functional.einsum])
def test_an_einsum_of_three_operands_is_two_products(einsum: Callable[..., Tensor]):
    """But one call where `uu.functional.einsum` computes it: that is measured from outside."""

    class Contraction(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return einsum("ij,jk,kl->il", x, x, (x,) if einsum is not torch.einsum else x)

    result = uu.verify(Contraction(), torch.randn(4, 4, requires_grad=True))
    calls = Counter(row.number for row in result if row.kind == "activation")
    note = "einsum in the model itself: its steps are one call, not measured inside"
    if einsum is torch.einsum:
        assert (calls, result.notes) == ({0: 2, 1: 2}, [])
    else:
        assert (calls, result.notes) == ({0: 3}, [note])


def test_kernels_that_cannot_be_seen_through_are_noted():
    class Folded(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.conv_tbc(x, x, x[0, 0])

    (note,) = uu.verify(Folded(), torch.randn(4, 4, 4, requires_grad=True)).notes
    assert note == "conv_tbc in the model itself is not measured: call conv1d"


def test_products_that_compute_a_weight_are_none_of_the_models():
    """The power iteration of a spectral norm multiplies the weight, which is then divided by it."""
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(32, 32))
    result = uu.verify(uu.transforms.unit_scale(layer), torch.randn(64, 32))
    assert {row.call for row in result} == {"linear"}
    assert result.share("weight") == 1


def test_products_of_constants_have_no_row():
    """The angles of rotary embeddings are none of the model's values, nor is a mask that has only
    the dtype of one."""

    class Masked(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            angles = torch.einsum("i,j->ij", torch.arange(8.0), torch.arange(4.0))
            y = x @ self.weight
            lowest = torch.full((8, 8), -3e38).type_as(y)
            return y * angles.cos() + (torch.eye(8) @ lowest).clamp(0)[:, :4]

    model = Masked(4, 4, bias=False)
    assert {row.call for row in uu.verify(model, torch.randn(8, 4))} == {"matmul"}
    assert len([row for row in uu.verify(model, torch.randn(8, 4)) if row.tensor == "input"]) == 1
