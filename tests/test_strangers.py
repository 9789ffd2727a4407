"""The benchmark of models of other libraries: what it reads, on models whose values are known, and
the form of its rows. The libraries themselves are not needed."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fp8
from benchmarks.strangers import collection, reduced
from benchmarks.strangers.__main__ import COMPILED, has_all, measured, record, recorded, summary
from benchmarks.strangers.case import Case, Stranger, find_loss, loss_inside, loss_outside
from benchmarks.strangers.examine import (
    Options,
    Ratios,
    examine,
    is_inside,
    on_grid,
    step_read,
)
from benchmarks.strangers.operands import Operands
from fp8.casts.counts import OPEN


class Known(nn.Module):
    """Two linear maps with constant weights, and what is multiplied with zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8, bias=False)
        self.second = nn.Linear(8, 2, bias=False)
        self.silent = nn.Linear(4, 2, bias=False)
        nn.init.constant_(self.first.weight, 0.5)
        nn.init.constant_(self.second.weight, 8.0)
        nn.init.constant_(self.silent.weight, 0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) + self.silent(x)


def read(model: nn.Module, *args: Any, scale: float = 1.0) -> Operands:
    case = Case(model, args, loss=lambda output: scale * output.sum())
    return step_read(case, model)


def rms_of(mode: Operands, kind: str) -> list[tuple[str, float]]:
    return [(o.path, o.rms) for o in mode.operands if o.kind == kind]


def test_the_rms_of_every_operand_is_exact() -> None:
    """x is 2: the hidden layer is 4 * 2 * 0.5 = 4. The gradient of the output is 1/16, of the
    hidden layer 2 * 8/16 = 1; the input needs none. Each operand is read where it is used."""
    mode = read(Known(), torch.full((3, 4), 2.0), scale=1 / 16)
    assert mode.products == 3 + 3 + 1  # forward, of the weights, and to the hidden layer
    forward = [("first", 2.0), ("second", 4.0), ("silent", 2.0)]
    assert rms_of(mode, "activation")[:3] == forward
    assert sorted(rms for _, rms in rms_of(mode, "activation")[3:]) == [2.0, 2.0, 4.0]
    weights = [("first", 0.5), ("second", 8.0), ("silent", 0.0), ("second", 8.0)]
    assert rms_of(mode, "weight") == weights
    gradients = sorted(rms for _, rms in rms_of(mode, "gradient"))
    assert gradients == [1 / 16, 1 / 16, 1 / 16, 1.0]
    assert ("second", 1 / 16) in rms_of(mode, "gradient")
    assert mode.zeros == 1
    assert mode.share("activation") == 1.0
    assert mode.share("weight") == 1 / 3  # the one of zeros aside
    assert mode.share("gradient") == 1 / 4
    assert str(mode.worst()[0]).startswith("gradient 0.062 in mm at s")


def test_convolutions_and_the_inputs_of_a_model_with_a_gradient() -> None:
    model = nn.Sequential(nn.Conv1d(1, 2, 3, bias=False), nn.Conv1d(2, 1, 1, bias=False))
    for layer in model:
        nn.init.constant_(layer.weight, 0.5)
    mode = read(model, torch.full((1, 1, 3), 2.0))
    found = [(o.call, o.kind, o.rms) for o in mode.operands]
    assert found == [
        ("convolution", "activation", 2.0),
        ("convolution", "weight", 0.5),
        ("convolution", "activation", 3.0),
        ("convolution", "weight", 0.5),
        ("convolution_backward", "gradient", 1.0),
        ("convolution_backward", "activation", 3.0),
        ("convolution_backward", "weight", 0.5),
        ("convolution_backward", "gradient", 0.5),
        ("convolution_backward", "activation", 2.0),  # the model's input needs no gradient
    ]


def test_the_kernel_of_a_convolution_is_a_weight_whatever_computes_it() -> None:
    """A factor rides in it."""

    class Dynamic(nn.Module):
        def forward(self, x: Tensor, kernel: Tensor) -> Tensor:
            return F.conv1d(x, 2 * kernel)

    x = torch.ones(1, 1, 3, requires_grad=True)
    mode = read(Dynamic(), x, torch.full((1, 1, 1), 0.5, requires_grad=True))
    kinds = {(o.call, o.place): o.kind for o in mode.operands}
    forward = {("convolution", 0): "activation", ("convolution", 1): "weight"}
    backward = dict(enumerate(("gradient", "activation", "weight")))
    assert kinds == forward | {("convolution_backward", i): k for i, k in backward.items()}


def test_outputs_of_softmaxes_are_aside() -> None:
    class Attention(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            scores = (x @ x.mT).softmax(-1)
            return (F.dropout(scores, 0.5) * 2) @ x

    x = torch.ones(1, 16, 4, requires_grad=True)
    mode = read(Attention(), x)
    softmax = [o for o in mode.operands if o.softmax]
    assert len(softmax) == 2  # forward, and for the gradient of the values
    assert not any(o.counted for o in softmax)
    assert sum(o.scores for o in mode.operands) == 2


class _Similarity(nn.Module):
    def forward(self, y: Tensor) -> Tensor:
        return (y @ y.mT).sum()


@pytest.mark.parametrize("loss", [_Similarity().forward, _Similarity()])
def test_products_of_a_loss_outside_of_the_model_are_aside(loss: Any) -> None:
    model = nn.Linear(4, 4, bias=False)
    mode = step_read(Case(model, (torch.randn(8, 4),), loss=loss), model)
    assert [o.call for o in mode.operands] == ["mm"] * 4
    assert [o.kind for o in mode.operands] == ["activation", "weight", "gradient", "activation"]


def test_a_weight_computed_from_parameters_is_a_weight_and_a_constant_none() -> None:
    class Computed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            constant = torch.ones(4, 4) @ torch.ones(4, 4)
            return x @ (self.w * constant).tanh()

    mode = read(Computed(), torch.ones(2, 4))
    assert mode.products == 2
    assert [o.kind for o in mode.operands] == ["activation", "weight", "activation", "gradient"]


def test_the_gradients_start_as_normal_numbers_where_there_is_no_loss() -> None:
    model = nn.Linear(4, 64, bias=False)
    mode = step_read(Case(model, (torch.randn(256, 4),)), model)
    (gradient,) = rms_of(mode, "gradient")
    assert gradient[1] == pytest.approx(1, abs=0.03)  # of 2**14 numbers: 5 standard deviations


@pytest.mark.parametrize("kind", ["activation", "gradient"])
def test_on_the_grid_up_to_a_factor(kind: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(256)
    cast = fp8.quantize(x, {"activation": "e4m3", "gradient": "e5m2"}[kind])
    for factor in (1.0, 0.25, 0.3, 1 / 768**0.5):
        assert on_grid(cast * factor, kind)
    assert not on_grid(x, kind)
    assert not on_grid(torch.where(torch.arange(256) == 7, x, cast), kind)


# Rows


def _network() -> Case:
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.Linear(64, 4))
    return loss_inside(model, F.cross_entropy, torch.randint(4, (32,)), torch.randn(32, 16))


class Broken(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("of its own\nand more")


class Careful(nn.Module):
    """Runs once."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if type(self.layer) is not nn.Linear:
            raise KeyError("it was changed")
        return self.layer(x)


def _broken() -> Case:
    return Case(Broken(), (torch.randn(2, 2),))


def _careful() -> Case:
    return Case(Careful(), (torch.randn(2, 4),))


KEYS = {"name", "library", "result", "products", "plain_activation", "plain_gradient"}


def test_the_row_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda m, **_: compile(m, backend="aot_eager"))
    rows: list[dict[str, Any]] = []
    examine(Stranger("net", "none", _network), Options(train=True, compiled=True), rows.append)
    row = rows[-1]
    assert set(row) >= KEYS | {"activation", "weight", "gradient", "inside", "verify", "preserve"}
    assert (row["result"], row["preserve"], row["inside"]) == ("runs", "exact", True)
    assert row["static"] == 1
    assert row["cast"] == row["unit_cast"] == f"{row['products']}/{row['products']}"
    assert isinstance(row["agrees"], bool)
    assert row["fp32_fall"] < 1
    assert row["fp8_fall"] < 1
    assert float(row["compiled"]) <= COMPILED
    assert json.loads(json.dumps(row)) == row
    assert "1 models: 1 runs; inside 1 of 1" in summary([row])


def test_the_ratio_of_a_cast_is_the_rms_over_the_scale() -> None:
    """Calibrated with an input of 2 and a gradient of 1, called with 3 and 1/4."""
    layer = nn.Linear(4, 4, bias=False)
    nn.init.constant_(layer.weight, 0.5)
    ratios = Ratios(fp8.convert(layer, "static"))
    fp8.calibrate(layer, torch.full((2, 4), 2.0), torch.sum)
    OPEN.recorders.append((ratios, Counter()))
    output = layer(torch.full((2, 4), 3.0))
    OPEN.recorders.pop()
    (output.sum() / 4).backward()
    found = [(name.split()[1], ratio) for name, ratio in ratios.ratios]
    assert sorted(found) == [("grad", 0.25), ("input", 1.5), ("weight", 1.0)]


def test_a_model_that_fails_is_a_row() -> None:
    rows: list[dict[str, Any]] = []
    examine(Stranger("careful", "none", _careful), Options(), rows.append)
    assert rows[-1]["result"] == "failed: KeyError: 'it was changed'"
    assert rows[-1]["cast"].startswith("failed")


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # of Python 3.12, with threads
def test_a_model_that_cannot_be_built_is_a_row() -> None:
    row = measured(Stranger("broken", "none", _broken), Options(), 60)
    assert row["result"] == "not built: RuntimeError: of its own"
    assert row["name"] == "broken"


def test_a_share_of_none_is_not_inside_and_no_operand_is() -> None:
    assert is_inside({"activation": 0.95, "weight": 0.0, "gradient": None})
    assert not is_inside({"activation": 1.0, "weight": 1.0, "gradient": 0.0})
    assert not is_inside({"activation": 0.9, "weight": 1.0, "gradient": 1.0})


def test_losses_are_found() -> None:
    loss = torch.ones((), requires_grad=True)
    for output in (loss, {"loss": loss}, (loss, torch.ones(3))):
        assert find_loss(output) is not None
    assert find_loss(torch.ones(3, requires_grad=True)) is None
    case = loss_outside(nn.Identity(), F.mse_loss, torch.zeros(2), torch.ones(2))
    assert case.run(case.model)[1] == 1.0


def test_the_collection_is_large_and_says_what_is_missing() -> None:
    names = [(s.package, s.name) for s in collection.STRANGERS]
    assert len(set(names)) == len(names) >= 100
    assert len({library for library, _ in names}) >= 10
    assert collection.missing("no-such-library") == "no-such-library is not installed"
    assert collection.missing("torch") == ""


@pytest.mark.parametrize(
    ("name", "value", "smaller"),
    [
        ("hidden_size", 4096, 64),
        ("hidden_size", 32, 32),
        ("num_hidden_layers", 32, 2),
        ("num_key_value_heads", 8, 2),
        ("attention_dropout", 0.1, 0.0),
        ("rope_theta", 1e6, 1e6),
        ("depths", [2, 2, 6], [1, 1, 1]),
        ("layer_types", ["full"] * 3 + ["sliding"], ["full", "sliding"]),
        ("tie_word_embeddings", True, True),
    ],
)
def test_sizes_of_an_architecture_are_reduced_by_their_names(
    name: str, value: object, smaller: object
) -> None:
    assert reduced._smaller(name, value) == smaller


def test_an_architecture_is_reduced_built_and_run() -> None:
    pytest.importorskip("transformers")
    (llama,) = (stranger for stranger in reduced.strangers() if stranger.name == "llama")
    case = llama.build()
    assert sum(p.numel() for p in case.model.parameters()) < 200_000
    _, loss = case.run(case.model)
    assert loss is not None


def test_a_row_that_has_what_is_asked_is_not_measured_again(tmp_path: Path) -> None:
    out = tmp_path / "rows" / "strangers.jsonl"
    assert recorded(out) == {}
    row = {"name": "net", "library": "none", "result": "runs"}
    for each in (row, row | {"fp32_fall": 0.5}):
        record(each, out)
    found = recorded(out)["none/net"]
    assert found == row | {"fp32_fall": 0.5}
    assert has_all(found, Options(train=True))
    assert not has_all(found, Options(train=True, compiled=True))
    assert has_all({"result": "failed: KeyError"}, Options(compiled=True))
