"""Tables and plots of the scales in a model, from the graphs of `track_scales`.

Requires pandas or matplotlib: install ``unit-scaling-fp8[analysis]``.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from fp8.common.libraries import need
from fp8.common.step import find_loss
from fp8.common.validation import check_whole
from fp8.formats.format import FORMATS

from .transforms.track_scales import (
    Metrics,
    prune_non_float_tensors,
    prune_same_scale_tensors,
    track_scales,
)

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes

__all__ = ["example_batch", "graph_to_dataframe", "plot", "visualiser"]

_COLOURS = {"fwd": "#0173b2", "bwd": "#de8f05"}  # blue and orange: colour-blind safe
_NAMES = {"fwd": "forward pass", "bwd": "backward pass"}


def example_batch(
    tokenizer: Any,
    batch_size: int,
    seq_len: int,
    dataset_path: str = "wikitext",
    dataset_name: str = "wikitext-103-v1",
    shuffle_buffer_size: int = 10_000,
    seed: int = 1472,
    *,
    text: str | Path | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns a batch of token ids from a text. Nothing is downloaded.

    Each sequence starts at one of the first ``shuffle_buffer_size`` tokens, drawn with ``seed``.

    Args:
        tokenizer: has a method ``encode``, or is callable, on a string, and returns ids or a
            mapping with "input_ids".
        dataset_path: the path of a text file, used if ``text`` is None.
        dataset_name: not used.
        text: the text, or the path of a text file as a `pathlib.Path`.

    Returns:
        Token ids, a mask of ones, and the id that follows each token; each (batch_size, seq_len).

    Raises:
        ValueError: a size is below 1, there is no text, or it is shorter than a sequence.
    """
    check_whole("batch_size", batch_size)
    check_whole("seq_len", seq_len)
    wanted = shuffle_buffer_size + seq_len
    # No more than needed: tokens of natural text rarely exceed 16 characters.
    ids = getattr(tokenizer, "encode", tokenizer)(
        _text(text, dataset_path)[: 16 * wanted]
    )
    if isinstance(ids, Mapping):
        ids = ids["input_ids"]
    ids = getattr(ids, "ids", ids)
    ids = torch.as_tensor(ids, dtype=torch.long).flatten()[:wanted]
    starts = ids.numel() - seq_len
    if starts < 1:
        raise ValueError(
            f"a text of {ids.numel()} tokens is too short for sequences of {seq_len}"
        )
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(starts, (batch_size, 1), generator=generator)
    sequences = ids[start + torch.arange(seq_len + 1)]
    inputs = sequences[:, :-1].clone()
    labels = sequences[:, 1:].clone()
    return inputs, torch.ones_like(inputs), labels


def _text(text: str | Path | None, dataset_path: str) -> str:
    if isinstance(text, str):
        return text
    path = Path(dataset_path if text is None else text)
    if not path.is_file():
        raise ValueError(
            f"there is no file {str(path)!r}, and nothing is downloaded: give the text as "
            "text=, a string or a pathlib.Path"
        )
    return path.read_text(encoding="utf-8")


def graph_to_dataframe(g: Graph) -> pandas.DataFrame:
    """Returns the metrics of a graph of `track_scales` as a table, two rows for each tensor.

    Returns:
        A data frame with columns "layer", "weight tensor" (whether it is a parameter), "direction"
        ("fwd" or "bwd"), "tensor type" ("x", "w", "grad_x" or "grad_w") and `Metrics.full_names`.
        Unknown gradients have missing values.
    """
    import pandas

    rows = []
    for node in _measured(g):
        kind = "w" if node.meta["requires_grad"] else "x"
        for direction, prefix in (("fwd", ""), ("bwd", "grad_")):
            data = getattr(node.meta["metrics"], direction)
            numbers = [getattr(data, name, None) for name in Metrics.names()]
            about = [node.meta["clean_name"], kind == "w", direction, prefix + kind]
            rows.append([*about, *numbers])
    columns = ["layer", "weight tensor", "direction", "tensor type"]
    return pandas.DataFrame(rows, columns=[*columns, *Metrics.full_names()])


def _measured(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if "metrics" in node.meta]


def plot(
    g: Graph,
    title: str = "",
    metric: str = "mean_abs",
    prune_same_scale: bool = True,
    show_arrows: bool = True,
    show_error_bars: bool = True,
    show_zero_tensors: bool = False,
    xmin: float | None = None,
    xmax: float | None = None,
) -> Axes:
    """Plots the scales of a graph of `track_scales`, one row for each tensor, in order.

    Points are tensors and their gradients, triangles are parameters and theirs. The axis is
    logarithmic and shows the limits of FP8 formats.

    Args:
        metric: one of `Metrics.names` or `Metrics.full_names`.
        prune_same_scale: omit nodes that do not change the scale of their input.
        show_arrows: draw arrows from each tensor to those computed from it.
        show_error_bars: draw bars from the smallest to the largest magnitude.
        show_zero_tensors: draw tensors of zeros at the left end of the axis.
        xmin, xmax: the ends of the axis.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: the metric is unknown, or the graph has no tensors.
    """
    need("matplotlib")
    from matplotlib import pyplot

    short = dict(zip(Metrics.full_names(), Metrics.names(), strict=True))
    metric = short.get(metric, metric)
    Metrics.get_full_name(metric)  # raises for an unknown name
    g = prune_non_float_tensors(g)
    if prune_same_scale:
        g = prune_same_scale_tensors(g)
    nodes = [node for node in _measured(g) if node.meta["metrics"].fwd.numel]
    if not nodes:
        raise ValueError("the graph has no tensors: run the model first")
    _, axes = pyplot.subplots(figsize=(10, 2 + len(nodes) / 4), layout="constrained")
    axes.set_xscale("log", base=2)
    axes.set_xlim(*_limits(nodes, metric, show_error_bars, xmin, xmax))
    _draw(axes, nodes, metric, show_error_bars, show_arrows, show_zero_tensors)
    _decorate(axes, nodes, title, metric)
    return axes


def _limits(
    nodes: list[Node], metric: str, bars: bool, xmin: float | None, xmax: float | None
) -> tuple[float, float]:
    names = {metric}
    if bars:
        names |= {"abs_min", "abs_max"}
    found = [data for node in nodes for data in _data(node).values()]
    values = [getattr(data, name) for data in found for name in names]
    logs = [math.log2(value) for value in values if 0 < value < math.inf]
    if xmin is None:
        xmin = 2.0 ** (min([-15.0, *logs]) - 1)
    if xmax is None:
        xmax = 2.0 ** (max([16.0, *logs]) + 1)
    return xmin, xmax


def _data(node: Node) -> dict[str, Metrics.Data]:
    metrics = node.meta["metrics"]
    both = {direction: getattr(metrics, direction) for direction in _NAMES}
    return {key: data for key, data in both.items() if data is not None}


def _draw(
    axes: Any, nodes: list[Node], metric: str, bars: bool, arrows: bool, zeros: bool
) -> None:
    """Draws tensors, one row each. Zeros and NaN are at the left end if shown."""
    left = axes.get_xlim()[0]
    at: dict[tuple[Node, str], tuple[float, int]] = {}
    for row, node in enumerate(nodes):
        for direction, data in _data(node).items():
            colour = _COLOURS[direction]
            value = getattr(data, metric)
            if bars and data.abs_max > 0:
                y = row + (-0.12 if direction == "fwd" else 0.12)
                style = {"color": colour, "alpha": 0.35, "linewidth": 1}
                ends = [max(data.abs_min, left), data.abs_max]
                axes.plot(ends, [y, y], marker="|", markersize=4, **style)
            is_shown = 0 < value < math.inf
            if zeros or is_shown:
                at[node, direction] = (value if is_shown else left, row)
                marker = "v" if node.meta["requires_grad"] else "o"
                axes.plot(*at[node, direction], marker, color=colour, markersize=5)
    for (node, direction), place in at.items() if arrows else ():
        for source in node.all_input_nodes:
            if (source, direction) in at:
                before = at[source, direction]
                start, end = (before, place) if direction == "fwd" else (place, before)
                arrow = {"arrowstyle": "->", "color": _COLOURS[direction], "alpha": 0.6}
                axes.annotate("", xy=end, xytext=start, arrowprops=arrow)


def _decorate(axes: Any, nodes: list[Node], title: str, metric: str) -> None:
    axes.set_ylim(len(nodes) - 0.5, -0.5)
    axes.set_yticks(range(len(nodes)), [_label(node) for node in nodes], fontsize=8)
    axes.set_xlabel(Metrics.get_full_name(metric))
    axes.grid(axis="y", alpha=0.3)
    place = {"transform": axes.get_xaxis_transform(), "ha": "center", "va": "bottom"}
    for name, style in (("e4m3", ":"), ("e5m2", "--")):
        ends = {"min\nnormal": FORMATS[name].min_normal, "max": FORMATS[name].max}
        for what, value in ends.items():
            axes.axvline(value, color="grey", linestyle=style, linewidth=1)
            axes.text(value, 1.0, f"{name}\n{what}", fontsize=7, **place)
    marks = [(".", colour, _NAMES[direction]) for direction, colour in _COLOURS.items()]
    marks += [("v", "grey", "parameter"), (".", "grey", "other tensor")]
    handles = []
    for mark, colour, label in marks:
        handles += axes.plot([], [], mark, color=colour, label=label)
    axes.legend(handles=handles, loc="lower left", fontsize=8)
    if title:
        axes.figure.suptitle(title, fontweight="bold")


def _label(node: Node) -> str:
    """The name without common prefixes and without the number added by fx."""
    prefixes = r"^self_|modules_|parameters_|buffers_"
    return re.sub(r"_\d+$", "", re.sub(prefixes, "", str(node.meta["clean_name"])))


def visualiser(
    model: nn.Module,
    tokenizer: Any,
    batch_size: int,
    seq_len: int,
    backward: bool = True,
    dataset_path: str = "wikitext",
    dataset_name: str = "wikitext-103-v1",
    *,
    text: str | Path | None = None,
    **plot_kwargs: Any,
) -> Axes:
    """Plots the scales of a language model on a text, with the arguments of `example_batch` and
    `plot`.

    A model with an argument ``input_ids`` is called as in Hugging Face: ``model(input_ids=...,
    attention_mask=..., labels=...)``, where the labels are the ids, which the model shifts. Other
    models are called as ``model(inputs, labels)``. The loss is the output's ``loss`` or its first
    tensor without dimensions; ValueError is raised if there is none. The model is not changed.
    """
    inputs, mask, labels = example_batch(
        tokenizer, batch_size, seq_len, dataset_path, dataset_name, text=text
    )
    tracked: Any = track_scales(model)
    device = next((p.device for p in tracked.parameters()), inputs.device)
    inputs, mask, labels = (t.to(device) for t in (inputs, mask, labels))
    if "input_ids" in inspect.signature(model.forward).parameters:
        output = tracked(input_ids=inputs, attention_mask=mask, labels=inputs)
    else:
        output = tracked(inputs, labels)
    if backward:
        loss = find_loss(output)
        if loss is None:
            raise ValueError(
                "the model's output has no loss: no tensor without dimensions"
            )
        loss.backward()
    return plot(tracked.scales_graph(), **plot_kwargs)
