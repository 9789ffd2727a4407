"""Does the best learning rate of a small model hold for a larger one? Models to find out with.

`PARAMETRISATIONS` has the same transformer in plain PyTorch with GPT-2's initialisation and AdamW,
and in unit scaling with u-muP's learning rates: as they are, and in two variants. `train` is one
run of any, `best_rate` reads a sweep. Used by umup_transfer.ipynb and by
``python -m benchmarks.transfer``.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import unit_scaling as uu
from unit_scaling.parameter import set_depth

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INIT_STD = 0.02  # GPT-2's initialisation
HEAD_WIDTH = 32  # more heads, not wider ones, in a wider model
MLP_RATIO = 4
BETAS = (0.9, 0.99)  # nanoGPT's
BASE_DEPTH = 2  # of the model that is tuned
ENDS_RATE = 4  # times that of the blocks
COMPLETE, ENDS = "u-muP, CompleteP", f"u-muP, ends x{ENDS_RATE}"


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """What all runs of a comparison share.

    Each step sees `batch_size` examples of `context` tokens. The learning rate rises over the
    first tenth of the steps and falls to zero along a cosine. There is no weight decay.
    """

    vocab: int
    context: int = 64
    batch_size: int = 8
    steps: int = 200
    eval_batches: int = 16


class Block(nn.Module):
    """Attention and gated MLP, each after a norm: `uu.TransformerLayer` in plain PyTorch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, MLP_RATIO * width, bias=False)
        self.gate = nn.Linear(width, MLP_RATIO * width, bias=False)
        self.down = nn.Linear(MLP_RATIO * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attention(_norm(x))
        y = _norm(x)
        return x + self.down(self.up(y) * F.silu(self.gate(y)))

    def _attention(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, -1, HEAD_WIDTH))
        q, k, v = (part.transpose(-3, -2) for part in qkv.unbind(-3))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(-3, -2).flatten(-2))


class Decoder(nn.Module):
    """`uu.TransformerDecoder` in plain PyTorch: tokens (batch, time) to logits.

    Weights are N(0, 0.02), smaller by sqrt(2 layers) where a branch joins the residual (GPT-2).
    """

    def __init__(self, width: int, layers: int, vocab: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.layers = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.head = nn.Linear(width, vocab, bias=False)
        for name, parameter in self.named_parameters():
            joins = name.endswith(("out.weight", "down.weight"))
            nn.init.normal_(
                parameter, std=INIT_STD / math.sqrt(2 * layers if joins else 1)
            )

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(_norm(self.layers(self.embedding(tokens))))


def _norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=1e-5)


Built = tuple[nn.Module, torch.optim.Optimizer, Callable[[Tensor, Tensor], Tensor]]


def _standard(width: int, layers: int, vocab: int, lr: float) -> Built:
    model = Decoder(width, layers, vocab)
    return (
        model,
        torch.optim.AdamW(model.parameters(), lr, BETAS, weight_decay=0),
        F.cross_entropy,
    )


def _umup(
    width: int,
    layers: int,
    vocab: int,
    lr: float,
    ends: float = 1,
    complete: bool = False,
) -> Built:
    """ends: the rate of the embedding and the readout, times that of the blocks.

    complete: CompleteP (arXiv 2505.01618, table 1): branches of a weight in proportion to 1/layers
    and a rate that is the same at all depths, both u-muP's at BASE_DEPTH. Adam's eps, which it
    scales too, is far below the gradients and left as it is.
    """
    rule = uu.transformer_residual_scaling_rule(
        math.sqrt(BASE_DEPTH / layers) if complete else 1
    )
    heads = width // HEAD_WIDTH
    model = uu.TransformerDecoder(width, vocab, layers, heads, residual_scaling=rule)
    if complete:
        set_depth(model.layers, BASE_DEPTH)
    outer = [*model.embedding.parameters(), *model.projection.parameters()]
    groups = [{"params": outer, "lr": ends * lr}, {"params": model.layers.parameters()}]
    optimizer = uu.optim.AdamW(groups, lr, BETAS, weight_decay=0, lr_mult=uu.optim.UMUP)
    return model, optimizer, uu.functional.cross_entropy


#: Name -> (width, layers, vocab, lr) -> model, optimizer, loss of logits and targets.
PARAMETRISATIONS: dict[str, Callable[[int, int, int, float], Built]] = {
    "standard": _standard,
    "u-muP": _umup,
    COMPLETE: partial(_umup, complete=True),
    ENDS: partial(_umup, ends=ENDS_RATE),
}


def schedule(step: int, steps: int) -> float:
    """The share of the peak learning rate at a step."""
    warmup = max(steps // 10, 1)
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


def train(
    name: str,
    *,
    width: int,
    layers: int,
    lr: float,
    seed: int,
    experiment: Experiment,
    data: tuple[Tensor, Tensor],
) -> float:
    """The held-out loss after training; infinite if training has diverged.

    name: one of `PARAMETRISATIONS`. data: training and held-out tokens, each 1-D. The seed decides
    the initial weights and the examples; the held-out examples are always the same.
    """
    torch.manual_seed(seed)
    model, optimizer, loss = PARAMETRISATIONS[name](width, layers, experiment.vocab, lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: schedule(step, experiment.steps)
    )
    for rows in _examples(data[0], experiment.steps, experiment, seed):
        optimizer.zero_grad()
        value = loss(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        if not value.isfinite():
            return math.inf
        value.backward()
        optimizer.step()
        scheduler.step()
    with torch.no_grad():
        losses = [
            F.cross_entropy(
                model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()
            ).item()
            for rows in _examples(data[1], experiment.eval_batches, experiment, seed=-1)
        ]
    mean = statistics.fmean(losses)
    return mean if math.isfinite(mean) else math.inf


def _examples(
    tokens: Tensor, count: int, experiment: Experiment, seed: int
) -> Iterable[Tensor]:
    """`count` batches (batch_size, context + 1) of random stretches of a text."""
    generator = torch.Generator().manual_seed(seed + 1)
    shape = (count, experiment.batch_size, 1)
    starts = torch.randint(len(tokens) - experiment.context, shape, generator=generator)
    return (tokens[rows + torch.arange(experiment.context + 1)] for rows in starts)


def search(
    loss: Callable[[int], float], start: int, sides: int = 2
) -> dict[int, float]:
    """Losses by the logarithm of the rate, to base 2, with `sides` on either side of the best.

    Begins at `start` and goes downhill; steps of one, a factor of two.
    """
    losses = {k: loss(k) for k in (start - 1, start, start + 1)}
    while True:
        best = min(losses, key=lambda k: losses[k])
        missing = [k for k in range(best - sides, best + sides + 1) if k not in losses]
        if not missing:
            return losses
        nearest = min(missing, key=lambda k: abs(k - best))
        losses[nearest] = loss(nearest)


def best_rate(losses: Mapping[int, float]) -> float:
    """Where the parabola through the least loss and its neighbours is lowest, as a logarithm.

    The least loss itself where a neighbour is missing or infinite.
    """
    best = min(losses, key=lambda k: losses[k])
    low, here, high = (losses.get(best + step, math.inf) for step in (-1, 0, 1))
    curvature = low - 2 * here + high
    if not (math.isfinite(curvature) and curvature > 0):
        return float(best)
    return best + (low - high) / (2 * curvature)


def plot_sweeps(sweeps: Mapping[str, list[dict[str, Any]]], *, title: str) -> Figure:
    """Held-out loss against the learning rate: a row of axes for each sweep, one for each model.

    sweeps: name -> curves, each with "parametrisation", "size", "label" and "losses", from the
    logarithm of the rate, to base 2, to the losses of the seeds.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4 * len(sweeps)), dpi=150, layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    names = dict.fromkeys(
        c["parametrisation"] for curves in sweeps.values() for c in curves
    )
    grid = figure.subplots(len(sweeps), len(names), sharey="row", squeeze=False)
    for line, (name, curves) in zip(grid, sweeps.items(), strict=True):
        for axes, parametrisation in zip(line, names, strict=True):
            chosen = [c for c in curves if c["parametrisation"] == parametrisation]
            _draw_curves(axes, chosen)
            axes.set_title(f"{parametrisation}, {name}", loc="left", fontsize=10)
        line[0].set_ylabel("loss on held-out text")
    for axes in grid[-1]:
        axes.set_xlabel("learning rate")
    _scale_alike(figure.axes)
    return figure


def _scale_alike(grid: list[Axes]) -> None:
    """A factor of two is as long in all axes: how far a minimum moves can be compared."""
    spans = [axes.dataLim.intervalx for axes in grid]
    half = max(high - low for low, high in spans) / 2 + 0.4
    for axes, (low, high) in zip(grid, spans, strict=True):
        middle = (low + high) / 2
        axes.set_xlim(middle - half, middle + half)
        ticks = range(math.ceil(middle - half), math.floor(middle + half) + 1)
        axes.set_xticks(ticks, [f"$2^{{{k}}}$" for k in ticks])


def _draw_curves(axes: Axes, curves: list[dict[str, Any]]) -> None:
    """One line for each size, darker for a larger one; its lowest point marked, seeds as dots."""
    from matplotlib import colormaps

    for i, curve in enumerate(curves):
        color = colormaps["viridis_r"]((i + 1) / len(curves))
        means = {
            k: statistics.fmean(values) for k, values in sorted(curve["losses"].items())
        }
        means = {k: mean for k, mean in means.items() if math.isfinite(mean)}
        axes.plot(list(means), list(means.values()), color=color, label=curve["label"])
        for k in means:
            seeds = curve["losses"][k]
            axes.plot([k] * len(seeds), seeds, ".", color=color, markersize=3)
        best = min(means, key=lambda k: means[k])
        axes.plot(best, means[best], "o", color=color, markersize=7)
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#E5E5E5", linewidth=0.7)
