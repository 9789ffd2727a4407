"""A checkpoint of a transformed model is one of its plain class, which computes the same."""

import copy

import torch
from torch import nn

from tests.fp8.adapters.hub_models import gpt2, quiet, transformers  # noqa: F401
from tests.shared import assert_same, parametrize, theirs
from unit_scaling.transforms import simulate_fp8, unit_scale

IDS = torch.arange(24).reshape(2, 12)
X = torch.linspace(-2, 2, 32).view(4, 8)


def plain(seed=0):
    torch.manual_seed(seed)
    body = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.BatchNorm1d(8))
    return nn.Sequential(body, nn.GELU(), nn.Linear(8, 4))


def scaled(seed=0):
    model = unit_scale(plain(seed))
    model(X)
    return model


def same(model, other):
    models = [copy.deepcopy(each) for each in (model, other)]
    for training in (True, False):
        results = [each.train(training)(X) for each in models]
        assert_same(*results)


def test_a_transformed_model_loads_it():
    """A transformed one, and a plain one: whatever is loaded is the model's."""
    for state in (scaled(1).state_dict(), plain(1).state_dict()):
        model, other = scaled(), plain()
        model.load_state_dict(state, strict=True)
        other.load_state_dict(state, strict=True)
        same(model, other)


def test_simulated_casts_are_not_in_it():
    model = simulate_fp8(plain())
    assert list(model.state_dict()) == list(plain().state_dict())
    other = plain(1)
    other.load_state_dict(simulate_fp8(scaled()).state_dict(), strict=False)
    same(other, scaled())


# The library transformers


@torch.no_grad()
def hidden(model):
    """The last hidden states."""
    inner = getattr(model, "transformer", model)
    return inner.eval()(input_ids=IDS).last_hidden_state


@theirs
@parametrize("cls", ["GPT2LMHeadModel", "AutoModel"])
def test_files_of_transformers(cls, tmp_path):
    """Those of a part too."""
    model = unit_scale(gpt2())
    model(input_ids=IDS, labels=IDS).loss.backward()
    for i, part in enumerate((model, model.transformer)):
        part.save_pretrained(tmp_path / str(i))
        loaded = getattr(transformers, cls).from_pretrained(tmp_path / str(i))
        assert_same(hidden(loaded), hidden(model))
        assert type(loaded).__module__.startswith("transformers.")
