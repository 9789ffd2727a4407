"""`fp8.parity`: a trainer's and an engine's policy on one checkpoint, and the command for it."""

import json
import math
from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fp8
from fp8.__main__ import main
from fp8.lab.parity.engines import ENGINES
from tests.shared import (
    Net,
    assert_same,
    linears,
    pairs,
    parametrize,
    proves,
    refuses,
    seeded,
)

WORDS = 32


def twice(m, ids):
    x = m.tokens(ids)
    for block in m.blocks:
        x = x + m.dropout(block(x))
    logits = 4 * m.head(x)
    return SimpleNamespace(logits=logits) if m.named else logits


def network(named=False):
    """Ids to logits, by two blocks; the second one occurs twice."""
    torch.manual_seed(0)
    tokens = nn.Embedding(WORDS, 64)
    blocks = [linears(64, 64, nn.GELU, 64) for _ in range(2)]
    blocks, head = nn.ModuleList([*blocks, blocks[1]]), nn.Linear(64, WORDS)
    parts = {"tokens": tokens, "blocks": blocks, "head": head}
    return Net(twice, named=named, dropout=nn.Dropout(0.5), **parts)


def prompts():
    generator, shapes = seeded(1), ((3, 8), (5,), (2, 4))
    return [torch.randint(WORDS, shape, generator=generator) for shape in shapes]


def logits(model, recipe, ids):
    own = deepcopy(model).eval()
    own = own if recipe is None else fp8.convert(own, recipe)
    with torch.no_grad():
        return own(ids).double()


def divergence(log_q, log_p):
    return F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)


@proves("the field", "trainer and FP8 engine compared by log-probability")
@parametrize("named", [False, True])
def test_the_figures_are_those_of_the_distributions(named):
    """By the definitions, from models that are converted here."""
    model, ids = network(), prompts()
    given = {"train": "tensor", "rollout": "vllm_row", "bound": 1.0}
    found = fp8.parity(network(named), ids, **given)
    divergences, squares, changed, differences = [], [], [], []
    for each in ids:
        log_q = logits(model, "tensor", each).log_softmax(-1)
        log_p = logits(model, ENGINES["vllm_row"].recipe, each).log_softmax(-1)
        divergences += divergence(log_q, log_p).flatten()
        squares += (log_q.exp() ** 2 / log_p.exp()).sum(-1).flatten()
        changed += (log_q.argmax(-1) != log_p.argmax(-1)).double().flatten()
        of_tokens = (log_p - log_q)[..., :-1, :].gather(-1, each[..., 1:, None])[..., 0]
        differences += of_tokens.reshape(-1, each.shape[-1] - 1).tolist()
    assert found.kl == pytest.approx(float(torch.stack(divergences).mean()), rel=1e-12)
    assert found.ess == pytest.approx(1 / float(torch.stack(squares).mean()), rel=1e-12)
    assert found.changed == float(torch.stack(changed).mean())
    assert [len(row) for row in found.differences] == [7, 7, 7, 4, 3, 3]
    for row, wanted in pairs(found.differences, differences):
        assert row == pytest.approx(wanted, rel=1e-9, abs=1e-12)
    assert 1e-6 < found.kl < 1
    assert found.ess < 1


def test_two_runs_are_equal_and_change_nothing():
    model = network()
    before = deepcopy(model.state_dict())
    state = torch.get_rng_state()
    given = {"train": "static", "rollout": "vllm_static", "bound": 1e-9}
    first = fp8.parity(model, prompts(), **given)
    assert first == fp8.parity(model, prompts(), **given)
    assert first.kl > 0
    assert not first.ok
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert_same(model.state_dict(), before)
    assert {row.done for row in fp8.report(model)} == {"left alone"}


def test_the_trainer_s_model_as_it_is():
    """A converted and calibrated model keeps its scales, and its engine has none of them."""
    model, ids = fp8.convert(network(), "static"), prompts()
    fp8.calibrate(model, ids[0], lambda y: y.square().mean())
    found = fp8.parity(model, ids, rollout=fp8.Policy(None), bound=1.0)
    given = {"rollout": "vllm_row", "bound": 1.0}
    named = fp8.parity(network(), ids, train=fp8.Policy(None), **given)
    assert found.train == "as it is"
    assert found.kl > 0
    assert fp8.parity(model, ids, **given).kl != named.kl


def test_the_layers_that_make_it():
    """With one layer in the recipe all of the difference is that layer's; with two, a lower one is
    left without the first of the list than without the second."""
    model, ids = network(), prompts()
    high = fp8.Policy(None)

    def study(*layers):
        rollout = fp8.Policy(None, rules=[(layer, None, "mxfp4") for layer in layers])
        return fp8.parity(model, ids, train=high, rollout=rollout, bound=1.0)

    alone = {name: study(name) for name in ("head", "blocks.1.0")}
    for name, found in alone.items():
        assert found.layers == [(name, 0.0, 1.0)]
    both = study("head", "blocks.1.0")
    for row in both.layers:
        (other,) = alone.keys() - {row.name}
        assert row.kl == alone[other].kl
        assert row.share == (both.kl - row.kl) / both.kl
    assert both.layers[0].kl <= both.layers[1].kl
    given = {"train": high, "rollout": "vllm_row", "bound": 1.0}
    assert not fp8.parity(model, ids, **given, by_layer=False).layers


def some_nan(m, ids):
    y = m.head(m.tokens(ids))
    return torch.cat([y[..., :-1], torch.full_like(y[..., :1], math.nan)], -1)


def test_nan_is_beyond_every_bound():
    tokens, head = nn.Embedding(WORDS, 64), nn.Linear(64, WORDS)
    model, ids = Net(some_nan, tokens=tokens, head=head), torch.arange(16)
    found = fp8.parity(model, ids, rollout="vllm_row", bound=math.inf)
    assert math.isnan(found.kl)
    assert not found.ok
    values = found.to_dict()
    assert values["kl"] is None
    json.dumps(values, allow_nan=False)


def of_rounded(attend, axes, key_most, value_most):
    """Attention to keys and values in numbers of e4m3, with a scale for each group."""

    def rounded(x, most):
        scale = x.abs().amax(axes, keepdim=True) / most if most else 1.0
        return (x / scale).to(torch.float8_e4m3fn).float() * scale

    return lambda query, key, value, **how: attend(
        query, rounded(key, key_most), rounded(value, value_most), **how
    )


ALL = (0, 1, 2, 3)


@parametrize(
    "scaling, axes, most",
    [
        ("unit", ALL, (0, 0)),
        ("tensor", ALL, (448, 448)),
        ("vllm", ALL, (200, 100)),
        ("head", (2, 3), (448, 448)),
        ("token", (3,), (448, 448)),
    ],
)
def test_a_cache_in_fp8(scaling, axes, most, monkeypatch):
    """It rounds what attention reads. Its part is what is left without it, and the layers' that
    without each."""
    hub_models = pytest.importorskip("tests.fp8.adapters.hub_models")
    model = hub_models.llama(initializer_range=0.1).eval()
    ids = torch.arange(24).reshape(2, 12)
    high = fp8.Policy(None)
    found = fp8.parity(model, ids, rollout=high, bound=1.0, cache=scaling)
    assert found.layers == [("(cache)", 0.0, 1.0)]
    with torch.no_grad():
        plain = model(ids).logits
        attend = of_rounded(F.scaled_dot_product_attention, axes, *most)
        monkeypatch.setattr(F, "scaled_dot_product_attention", attend)
        wanted = model(ids).logits
    monkeypatch.undo()
    log_p, log_q = (x.double().log_softmax(-1) for x in (wanted, plain))
    wanted = float(divergence(log_q, log_p).mean())
    assert found.kl == pytest.approx(wanted, rel=1e-6)
    if scaling != "token":
        return
    both = fp8.parity(model, ids, rollout="vllm_row", bound=1.0, cache="token")
    alone = fp8.parity(model, ids, rollout="vllm_row", bound=1.0)
    assert {row.name: row.kl for row in both.layers}["(cache)"] == alone.kl
    assert "cache by token" in str(both)
    with refuses("unknown scaling of a cache 'row'"):
        fp8.parity(model, ids, rollout=high, bound=1.0, cache="row")


@parametrize(
    "changes, error, message",
    [
        ({"bound": -1.0}, ValueError, "bound must be 0 or larger, got -1.0"),
        ({"bound": math.nan}, ValueError, "bound must be 0 or larger, got nan"),
        ({"bound": "1"}, TypeError, "bound must be a number"),
        ({"rollout": "vllm_rwo"}, ValueError, "did you mean 'vllm_row'"),
        ({"prompts": []}, ValueError, "needs prompts, got none"),
        ({"prompts": [[1, 2]]}, TypeError, "int64, got list"),
        ({"prompts": torch.ones(4)}, TypeError, "int64, got torch.float32"),
        (
            {"prompts": torch.ones(4, 1).long()},
            ValueError,
            r"two tokens or more, got \(4, 1\)",
        ),
        ({"model": nn.Embedding(WORDS, 4).weight}, TypeError, "parity"),
        (
            {"model": nn.Flatten(0)},
            ValueError,
            r"must return logits of shape .* got \(24,\)",
        ),
        (
            {"cache": "token"},
            ValueError,
            "cache is for models of transformers, not a Net",
        ),
        ({"by_layer": 1}, TypeError, "by_layer"),
    ],
)
def test_bad_arguments(changes, error, message):
    given = {"model": network(), "prompts": prompts()[0], "bound": 1.0} | changes
    given.setdefault("rollout", fp8.Policy(None))
    with refuses(message, error):
        fp8.parity(given.pop("model"), given.pop("prompts"), **given)


SETUP = """
import torch
from tests.fp8.lab.test_parity import network, prompts

def model():
    return network()

def setup(seed):
    return network(), [{"input_ids": ids} for ids in prompts()], None
"""


@pytest.fixture
def setup_file(tmp_path):
    (tmp_path / "setup_of_parity.py").write_text(SETUP)
    return str(tmp_path / "setup_of_parity.py")


def test_the_command(setup_file, tmp_path, capsys):
    policy = tmp_path / "policy.json"
    fp8.Policy("tensor", name="mine").to_json(policy)
    common = [f"{setup_file}:setup", "--train", str(policy)]
    assert main(["parity", "compare", *common, "--bound", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    wanted = fp8.parity(network(), prompts(), train="tensor", bound=1.0)
    assert found == wanted.to_dict() | {"train": "mine"}
    assert main(["parity", "compare", *common, "--bound", "1e-9", "--total"]) == 1
    shown = capsys.readouterr().out
    assert f"{wanted.kl:.3g} per token, beyond 1e-09" in shown
    assert "without" not in shown
    alone = [f"{setup_file}:model", "--train", "none", "--bound", "1"]
    assert main(["parity", "compare", *alone]) == 2
    assert "must return (model, batches[, loss]), got Net(" in capsys.readouterr().err
