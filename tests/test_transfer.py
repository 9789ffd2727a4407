"""The learning-rate sweep: its models, its search, its record."""

import json
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmarks import transfer, transfer_depth
from notebooks.nanogpt.data import load_corpus
from notebooks.transfer import (
    COMPLETE,
    ENDS,
    ENDS_RATE,
    PARAMETRISATIONS,
    Experiment,
    best_rate,
    plot_sweeps,
    schedule,
    search,
    train,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:AdamW steps:fp8.warnings.OptimizerWarning"),  # a sweep
    pytest.mark.usefixtures("one_thread"),  # models this small are slower on several
]
TINY = {"context": 8, "batch_size": 4, "eval_batches": 2}


def test_all_models_are_the_same_transformer():
    """In order: embedding, then attention and gated MLP of each layer, readout."""
    shapes = []
    for build in PARAMETRISATIONS.values():
        model, *_ = build(64, 2, 11, 0.1)
        tokens = torch.arange(11)[None]
        assert model(tokens).shape == (1, 11, 11)
        changed = model(torch.cat([tokens[:, :5], tokens[:, :6]], dim=1))
        assert torch.allclose(model(tokens)[:, :5], changed[:, :5], atol=1e-5)  # causal
        shapes.append([tuple(p.shape) for p in model.parameters()])
    assert all(others == shapes[0] for others in shapes)


def _rates(name: str, layers: int) -> dict[str, float]:
    model, optimizer, _ = PARAMETRISATIONS[name](64, layers, 11, 0.1)
    rates = {p: group["lr"] for group in optimizer.param_groups for p in group["params"]}
    return {name: rates[parameter] for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("layers", [2, 8])
def test_rates_of_the_variants(layers: int):
    plain, ends, complete = (_rates(name, layers) for name in ("u-muP", ENDS, COMPLETE))
    for name, rate in plain.items():
        inside = name.startswith("layers.")
        assert ends[name] == pytest.approx(rate if inside else ENDS_RATE * rate)
        assert complete[name] == pytest.approx(rate * math.sqrt(layers / 2) if inside else rate)


@pytest.mark.parametrize("layers", [2, 8])
def test_complete_p_weighs_each_branch_by_one_over_the_layers(layers: int):
    """Beside the embedding, whose share of the sum is what the branches' skips leave of it."""
    model, *_ = PARAMETRISATIONS[COMPLETE](64, layers, 11, 0.1)
    embedding, weights = 1.0, []
    for tau in (tau for layer in model.layers for tau in (layer.mhsa_tau, layer.mlp_tau)):
        skip = (1 + tau**2) ** -0.5
        weights = [weight * skip for weight in weights] + [tau * skip]
        embedding *= skip
    assert [w / embedding for w in weights] == pytest.approx([2**0.5 / layers] * 2 * layers)


@pytest.mark.parametrize("name", PARAMETRISATIONS)
def test_training(name: str, text_file: Path):
    corpus = load_corpus(str(text_file), context=8)
    data = corpus.train, corpus.val
    experiment = Experiment(vocab=len(corpus.symbols), steps=25, **TINY)
    size = {"width": 32, "layers": 1, "experiment": experiment, "data": data}
    rate = 2**-7 if name == "standard" else 2**-1
    loss = train(name, lr=rate, seed=0, **size)
    assert loss == train(name, lr=rate, seed=0, **size)
    assert loss != train(name, lr=rate, seed=1, **size)
    assert loss < 0.8 * math.log(len(corpus.symbols))
    assert train(name, lr=math.inf, seed=0, **size) == math.inf


def test_schedule():
    shares = [schedule(step, 40) for step in range(40)]
    assert shares[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert shares[4:] == sorted(shares[4:], reverse=True)
    assert 0 < shares[-1] < 0.01


@pytest.mark.parametrize("start", [-4, 0, 3, 9])
def test_search_finds_the_minimum(start: int):
    asked = []

    def loss(k: int) -> float:
        asked.append(k)
        return math.inf if k > 6 else (k - 2.3) ** 2

    losses = search(loss, start)
    assert set(losses) >= {0, 1, 2, 3, 4}
    assert len(asked) == len(set(asked)) == len(losses)
    assert best_rate(losses) == pytest.approx(2.3)
    assert best_rate({0: 1.0, 1: 2.0}) == 0.0  # at an edge
    assert best_rate({0: 2.0, 1: 1.0, 2: math.inf}) == 1.0


def _parabola(name: str, *, width: int, layers: int, lr: float, seed: int, **same: Any) -> float:
    """A loss whose best rate falls with the width in the standard parametrisation alone."""
    assert same.keys() == {"experiment", "data"}
    best = -8 - math.log2(width / 32) if name == "standard" else -1.3
    return 2 + (math.log2(lr) - best) ** 2 + 0.01 * seed


def test_benchmarks(text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each writes its record and figure; run again, they train nothing."""
    tiny = {"WIDTHS": (32, 64), "DEPTHS": (1,), "WIDTH": 32, "DEPTH": 1, "SEEDS": (0, 1)}
    for name, value in {**tiny, "train": _parabola}.items():
        monkeypatch.setattr(transfer, name, value)
    for module in (transfer, transfer_depth):
        monkeypatch.setattr(module, "FIGURE", tmp_path / "figure.png")
    monkeypatch.setattr(transfer_depth, "RECORD", tmp_path / "transfer.json")
    monkeypatch.setattr("benchmarks.common.RESULTS", tmp_path)
    monkeypatch.setattr(
        "sys.argv", ["transfer", f"--data={text_file}", f"--out={tmp_path / 'runs.jsonl'}"]
    )

    def run(module: ModuleType) -> list[dict[str, Any]]:
        assert module.main() == 0
        path = tmp_path / f"{module.__name__.removeprefix('benchmarks.')}.json"
        return json.loads(path.read_text())["rows"]

    records = [run(transfer), run(transfer_depth)]
    monkeypatch.setattr(transfer, "train", None)
    assert [run(transfer), run(transfer_depth)] == records
    for name in ("figure.png", "umup-depth.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    found = [(r["name"], r["width"], r["log2_best"], r["moved"]) for rows in records for r in rows]
    assert found == [
        ("standard by width", 32, -8, 0),
        ("standard by width", 64, -9, -1),
        ("u-muP by width", 32, -1.3, 0),
        ("u-muP by width", 64, -1.3, 0),
        ("standard by depth", 32, -8, 0),
        ("u-muP by depth", 32, -1.3, 0),
        (f"{COMPLETE} by depth", 32, -1.3, 0),
        (f"{ENDS} by depth", 32, -1.3, 0),
    ]


def test_figure_leaves_out_what_diverged():
    curve = {"label": "width 1", "losses": {0: [1.0], 1: [math.inf], -1: [2.0]}}
    curves = [{"parametrisation": name, **curve} for name in PARAMETRISATIONS]
    figure = plot_sweeps({"by width": curves}, title="a sweep")
    assert [list(axes.lines[0].get_xdata()) for axes in figure.axes] == [[-1, 0]] * len(
        PARAMETRISATIONS
    )
