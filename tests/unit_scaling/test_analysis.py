"""Tables, plots and batches of text."""

import math
import sys
from collections import UserDict

import pytest
import torch
from torch import nn

from fp8.formats.format import FORMATS
from tests.shared import Net, assert_same, pairs, parametrize, refuses
from tests.transforms.models import batch, tiny
from unit_scaling.analysis import example_batch, graph_to_dataframe, plot, visualiser
from unit_scaling.transforms import (
    Metrics,
    prune_non_float_tensors,
    track_scales,
    unit_scale,
)

TEXT = "".join(chr(97 + i * i % 26) for i in range(400))


def encode(text):
    return [ord(character) - 97 for character in text]


@pytest.fixture(autouse=True)
def _closed():
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    yield
    pyplot.close("all")


@pytest.fixture(scope="module")
def graph():
    model = track_scales(tiny())
    model(*batch())[1].backward()
    return model.scales_graph()


class WithEncode:
    def encode(self, text):
        return encode(text)


TOKENIZERS = {
    "a function": encode,
    "encode": WithEncode(),
    "a mapping": lambda text: UserDict(input_ids=[encode(text)]),
    "a tensor": lambda text: torch.tensor(encode(text)),
}


@parametrize("tokenizer", TOKENIZERS)
def test_example_batch(tokenizer, tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    inputs, mask, labels = example_batch(TOKENIZERS[tokenizer], 3, 8, text=TEXT)
    assert inputs.shape == labels.shape == mask.shape == (3, 8)
    assert inputs.dtype == torch.long
    assert_same(mask, torch.ones_like(inputs))
    assert_same(inputs[:, 1:], labels[:, :-1])
    for row in inputs.tolist():
        assert "".join(chr(97 + i) for i in row) in TEXT
    for given in ({"text": file}, {"dataset_path": str(file)}):
        assert_same(example_batch(encode, 3, 8, **given)[0], inputs)
    assert not torch.equal(example_batch(encode, 3, 8, seed=1, text=TEXT)[0], inputs)
    first = example_batch(encode, 50, 8, shuffle_buffer_size=2, text=TEXT)[0]
    assert len(set(map(tuple, first.tolist()))) == 2


def test_batches_that_cannot_be():
    with refuses("no file 'wikitext', and nothing is downloaded"):
        example_batch(encode, 2, 8)
    with refuses("a text of 4 tokens is too short for sequences of 4"):
        example_batch(encode, 2, 4, text="abcd")
    assert example_batch(encode, 2, 3, text="abcd")[0].tolist() == [[0, 1, 2]] * 2
    with refuses("seq_len must be a whole number from 1, got 0"):
        example_batch(encode, 2, 0, text="abcd")
    with refuses("list", TypeError):
        example_batch(None, 2, 8, text=["a"])  # type: ignore[arg-type]


def test_graph_to_dataframe(graph):
    pytest.importorskip("pandas")
    table = graph_to_dataframe(graph)
    about = ["layer", "weight tensor", "direction", "tensor type"]
    assert list(table.columns) == [*about, *Metrics.full_names()]
    tensors = [node for node in graph.nodes if "metrics" in node.meta]
    assert len(table) == 2 * len(tensors)
    for i, node in enumerate(tensors):
        forward, backward = table.iloc[2 * i], table.iloc[2 * i + 1]
        assert forward["layer"] == backward["layer"] == node.meta["clean_name"]
        assert (forward["direction"], backward["direction"]) == ("fwd", "bwd")
        kind = "w" if node.op == "placeholder" else "x"
        assert (forward["tensor type"], backward["tensor type"]) == (
            kind,
            f"grad_{kind}",
        )
        assert forward["standard deviation"] == node.meta["metrics"].fwd.std
        assert backward["root mean square"] == node.meta["metrics"].bwd.rms


def test_a_gradient_that_is_not_known_is_missing():
    pytest.importorskip("pandas")
    model = track_scales(nn.Linear(2, 2))
    model(torch.ones(1, 2))
    table = graph_to_dataframe(model.scales_graph())
    assert table[table["direction"] == "bwd"]["mean absolute value"].isna().all()
    assert table[table["direction"] == "fwd"]["mean absolute value"].notna().all()


def points(axes):
    """(x, y) of every point that is drawn -> its marker."""
    lines = [
        line
        for line in axes.lines
        if line.get_marker() in ("o", "v") and len(line.get_xdata())
    ]
    return {
        (line.get_xdata()[0], line.get_ydata()[0]): line.get_marker() for line in lines
    }


@parametrize("metric", ["rms", "absolute maximum"])
def test_plot_shows_every_tensor(graph, metric):
    axes = plot(graph, title="A title", metric=metric, prune_same_scale=False)
    nodes = [n for n in prune_non_float_tensors(graph).nodes if "metrics" in n.meta]
    short = dict(pairs(Metrics.full_names(), Metrics.names())).get(metric, metric)
    expected = {}
    for row, node in enumerate(nodes):
        marker = "v" if node.meta["requires_grad"] else "o"
        for data in (node.meta["metrics"].fwd, node.meta["metrics"].bwd):
            expected[getattr(data, short), row] = marker
    expected = {at: marker for at, marker in expected.items() if at[0] > 0}
    assert points(axes) == expected
    assert axes.get_xlabel() == Metrics.get_full_name(short)
    assert len(axes.get_yticklabels()) == len(nodes)
    assert axes.get_yticklabels()[0].get_text() == "tokens_weight"
    assert axes.figure.get_suptitle() == "A title"
    limits = {
        line.get_xdata()[0]
        for line in axes.lines
        if line.get_linestyle() in (":", "--")
    }
    formats = FORMATS["e4m3"], FORMATS["e5m2"]
    assert limits == {x for format in formats for x in (format.min_normal, format.max)}
    axes.figure.canvas.draw()


def test_plot_options(graph):
    assert len(points(plot(graph))) < len(points(plot(graph, prune_same_scale=False)))
    assert (
        len(plot(graph).texts) > len(plot(graph, show_arrows=False).texts) == 4
    )  # of limits
    assert len(plot(graph).lines) > len(plot(graph, show_error_bars=False).lines)
    assert plot(graph, xmin=2**-5, xmax=2.0).get_xlim() == (2**-5, 2.0)


def drawn(function, **options):
    """The axes of a model of a function, after its passes."""
    model = track_scales(Net(lambda m, x: function(x)))
    model(torch.ones(4)).sum().backward()
    axes = plot(model.scales_graph(), **options)
    axes.figure.canvas.draw()
    return axes


def test_tensors_that_have_no_place_on_the_axis():
    """Zeros, none at all, Inf and NaN."""
    hidden, shown = (
        drawn(lambda x: x * 0.0, show_zero_tensors=show) for show in (False, True)
    )
    assert (
        len(points(shown)) == len(points(hidden)) + 2
    )  # the output, and the input's gradient
    axes = drawn(lambda x: torch.cat([x[:0], x]), prune_same_scale=False)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["x", "cat"]
    axes = drawn(
        lambda x: torch.stack([x / 0, x / 0 - x / 0, x]), show_zero_tensors=True
    )
    assert all(math.isfinite(end) for end in axes.get_xlim())


class Named(nn.Module):
    """A model as Hugging Face writes them."""

    def __init__(self):
        super().__init__()
        self.model = tiny()

    def forward(self, input_ids, attention_mask, labels):
        assert attention_mask.all()
        assert_same(input_ids, labels)
        logits, loss = self.model(input_ids, labels)
        return {"logits": logits, "loss": loss}


class Sum(nn.Module):
    def forward(self, inputs, labels):
        return inputs + labels


def test_visualiser():
    for model in (unit_scale(tiny()), Named()):
        axes = visualiser(model, encode, 2, 8, text=TEXT, metric="rms")
        both = len(points(axes))
        options = {"prune_same_scale": False, "show_zero_tensors": True}
        forward = visualiser(model, encode, 2, 8, backward=False, text=TEXT, **options)
        assert both > 40
        assert len(forward.get_yticklabels()) == len(points(forward))
        assert all(p.grad is None for p in model.parameters())
    with refuses("the model's output has no loss"):
        visualiser(Sum(), encode, 2, 8, text=TEXT)


def test_what_is_refused(graph, monkeypatch):
    with refuses("has no tensors: run the model first"):
        plot(track_scales(tiny()).scales_graph())
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with refuses("matplotlib is not installed: pip install", ImportError):
        plot(graph)
