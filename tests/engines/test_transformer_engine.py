"""TransformerEngine with its compiled part, on a machine without a GPU. The tests of the adapter,
which elsewhere run its Python alone, run here too."""

import importlib.metadata

import pytest
import torch
from torch import nn

import fp8
from fp8.common.libraries import probe
from tests.fp8.adapters.te_library import VERSION, pretend_device
from tests.shared import parametrize, refuses

te = probe("transformer_engine").module
if te is None:
    pytest.skip(
        "TransformerEngine: its own environment, make test-engines",
        allow_module_level=True,
    )


@pytest.fixture(autouse=True)
def _device(monkeypatch):
    pretend_device(monkeypatch)


def test_version():
    for name in (
        "transformer_engine",
        "transformer_engine_cu13",
        "transformer_engine_torch",
    ):
        assert importlib.metadata.version(name) == VERSION


LAYERS = {
    "Linear": lambda: te.Linear(32, 32, device="cpu"),
    "LayerNorm": lambda: te.LayerNorm(32, device="cpu"),
    "RMSNorm": lambda: te.RMSNorm(32, device="cpu"),
    "LayerNormLinear": lambda: te.LayerNormLinear(32, 32, device="cpu"),
    "LayerNormMLP": lambda: te.LayerNormMLP(32, 64, device="cpu"),
}


@parametrize("kind", LAYERS)
def test_kernels_are_all_that_is_out_of_reach(kind):
    """A layer is made and takes part in a step of an optimizer; a pass ends at the device."""
    layer = LAYERS[kind]()
    for model in (
        layer,
        fp8.convert(nn.Linear(32, 32), "tensor", backend="transformer_engine"),
    ):
        with refuses("CUDA", RuntimeError):
            model(torch.randn(16, 32))
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    for parameter in layer.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    after = layer.state_dict()
    assert {
        name.rpartition("_")[2] for name, value in before.items() if not value.numel()
    } == {"state"}
    assert all(
        torch.equal(after[n], before[n] - 1) for n, _ in layer.named_parameters()
    )
    layer.load_state_dict(before)
