"""Models nobody here wrote: built from a configuration, with random weights."""

import logging

import pytest

import unit_scaling as uu
from benchmarks import zoo
from tests.shared import filterwarnings, parametrize, proves, quietly
from unit_scaling.transforms import unit_scale

with quietly():
    transformers = pytest.importorskip("transformers")

pytestmark = filterwarnings("default")  # theirs to fix


@pytest.fixture(autouse=True)
def quiet():
    logging.getLogger("transformers").setLevel(logging.ERROR)


@proves("unit-scaling", "unit_scale(model)")
@parametrize("name", ["Llama", "T5"])
def test_it_trains(name):
    model, batch = zoo.build(name)
    ours = unit_scale(model)
    first = ours(**batch).loss
    assert not uu.report(ours).left_alone
    model.load_state_dict(ours.state_dict(), strict=True)
    assert model.eval()(**batch).loss == ours.eval()(**batch).loss
    ours.train()
    optimizer = uu.optim.AdamW(ours.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        ours(**batch).loss.backward()
        assert all(
            p.grad.isfinite().all() for p in ours.parameters() if p.grad is not None
        )
        optimizer.step()
    assert ours(**batch).loss < first


@proves("unit-scaling", "any PyTorch model")
@parametrize("name", "BERT T5 ViT ConvNeXt RWKV Mamba OPT".split())
def test_casts_are_in_range(name):
    """At the second step, with the scales of the first."""
    found = zoo.examine(name)
    assert found["casts"] >= zoo.SHARE
    assert (found["left_alone"], found["weights"]) == (0, 1)
