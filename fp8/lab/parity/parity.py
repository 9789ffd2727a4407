"""`fp8.parity`: one checkpoint under the policies of its trainer and of an inference engine.

Reinforcement learning samples with an engine and trains on what it sampled. If the two compute
different probabilities, updates are off-policy by that difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from ...common.report import as_table, finite
from ...common.step import unwrapped
from ...common.validation import check_flag, check_module, check_number
from ...layers.settings import Converted
from .devices import Shared
from .sides import (
    Given,
    Measures,
    Side,
    check_cache,
    checked_prompts,
    logits_of,
    measures,
)

__all__ = ["LayerEffect", "Parity", "parity"]


class LayerEffect(NamedTuple):
    """The difference with one layer of the trainer in the engine's model. name: of the layer;
    "(cache)": the cache of keys and values. kl: as `Parity.kl`. share: the decrease of kl."""

    name: str
    kl: float
    share: float


@dataclass(frozen=True)
class Parity:
    """The result of `parity`. It prints as a table.

    Attributes:
        train, rollout: the names of the policies.
        cache: the scaling of the engine's cache of keys and values; "" for none in FP8.
        bound: the largest `kl` that is accepted.
        kl: KL(rollout || train): the mean over positions of the Kullback-Leibler divergence of the
            trainer's next-token distribution from the engine's, which samples, in nats per token.
        ess: the effective sample size of the importance weights train / rollout of tokens sampled
            by the engine, as a share of their number: 1 / E[weight**2], 1 without a difference.
        changed: the share of positions whose most probable token differs.
        differences: log-probability under the engine minus that under the trainer, of each token of
            each prompt after the first, row by row.
        layers: what is left without each layer, least first: the largest contribution.
    """

    train: str
    rollout: str
    cache: str
    bound: float
    kl: float
    ess: float
    changed: float
    differences: list[list[float]]
    layers: list[LayerEffect]

    @property
    def ok(self) -> bool:
        """Whether `kl` is within the bound; False for NaN."""
        return self.kl <= self.bound

    def to_dict(self) -> dict[str, Any]:
        """All figures as plain values; None for those that are not finite."""
        layers = [row._asdict() for row in self.layers]
        return finite(asdict(self) | {"layers": layers, "ok": self.ok})

    def __str__(self) -> str:
        sizes = [abs(value) for row in self.differences for value in row]
        mean, largest = sum(sizes) / max(len(sizes), 1), max(sizes, default=0.0)
        outcome = "within" if self.ok else "beyond"
        rollout = self.rollout
        if self.cache:
            rollout += f", cache by {self.cache}"
        figures = [
            ("train", self.train),
            ("rollout", rollout),
            (
                "KL(rollout || train)",
                f"{self.kl:.3g} per token, {outcome} {self.bound:.3g}",
            ),
            ("log-probability", f"differs by {mean:.3g}, at most {largest:.3g}"),
            ("effective sample size", f"{self.ess:.4%}"),
            ("argmax changed", f"{self.changed:.2%}"),
            ("tokens", str(len(sizes))),
        ]
        text = as_table(figures)
        if not self.layers:
            return text
        layers = [
            (row.name, f"{row.kl:.3g}", f"{row.share:.1%}") for row in self.layers
        ]
        return f"{text}\n\n{as_table([('without', 'KL', 'less by'), *layers])}"


def parity(
    model: nn.Module,
    prompts: Tensor | Iterable[Tensor],
    *,
    train: Given | None = None,
    rollout: Given = "vllm_row",
    bound: float,
    cache: str | None = None,
    sums: str | None = None,
    devices: int = 1,
    train_devices: int = 1,
    split: Iterable[str] | None = None,
    by_layer: bool = True,
) -> Parity:
    """Compares the next-token distributions of one checkpoint under two policies: a `Parity`.

    Every pass runs in evaluation mode without gradients, on copies that share the parameters of
    ``model``; random bits have seed 0, and equal arguments give equal results. Distributions are
    computed from the logits in float64. NaN in logits gives NaN, which is beyond every bound.

    Args:
        model: maps token ids to logits (..., tokens, vocabulary), as a tensor or an output with
            ``.logits``. It is called with the ids alone, and not changed.
        prompts: ids, int64, (tokens,) or (batch, tokens) without padding, at least two tokens: one
            tensor or several.
        train: the trainer's policy: a name in `fp8.RECIPES`, a `Recipe` or a `Policy`; None: the
            model as it is, converted and calibrated or in its own precision. ``Policy(None)`` is
            the model in high precision.
        rollout: the engine's, likewise, or a name in `fp8.lab.parity.engines.ENGINES`, with the
            norms of the engine. Static scales are measured on the first prompt, by `fp8.calibrate`;
            so are those of ``train`` unless it is None.
        bound: the largest KL(rollout || train), in nats per token, that is accepted.
        cache: the scaling of a cache of keys and values in FP8 in the engine
            (`fp8.adapters.transformers.KV_SCALINGS`); None: no such cache. Models of transformers
            only.
        sums: the sums of both, `fp8.Recipe.accumulate` of recipes that state none: "exact",
            "hopper" or "ada"; None: torch's sums.
        devices: the number of devices that share the model of the engine by tensor parallelism
            (`fp8.lab.parity.devices`). `Engine.reduction` says how their partial outputs are added.
        train_devices: of the trainer, likewise, if each casts its own slice of the inputs.
        split: patterns of the names of the linear layers whose inputs devices split, as those of
            `fp8.LayerRule`; None: those that the model's ``tp_plan`` names (transformers).
        by_layer: whether to measure each layer, which takes a pass over the prompts for each.

    Raises:
        TypeError: if ``model`` is not a module, and for prompts that are not tensors of int64.
        ValueError: for an unknown recipe, prompts of fewer than two tokens or none, a bound that is
            negative or NaN, a cache for a model that is not of transformers, and logits of another
            shape; for several devices without a plan of layers, or that cannot split their inputs.
    """
    check_module("parity", model)
    check_number("bound", bound)
    check_flag("by_layer", by_layer)
    if not bound >= 0:
        raise ValueError(f"bound must be 0 or larger, got {bound!r}")
    model, ids = unwrapped(model), checked_prompts(prompts)
    check_cache(model, cache)
    engine = Side.of(rollout, sums).shared(model, devices, split, None)
    trainer = Side.of(train, sums).shared(model, train_devices, split, engine.engine)
    # Copies, as the effect of a layer is measured by putting one of ours in the place of theirs.
    ours, theirs = (side.of_model(model, ids[0]) for side in (trainer, engine))
    wanted = logits_of(ours, ids)

    def measured(cache: str | None) -> Measures:
        return measures(wanted, logits_of(theirs, ids, cache), ids)

    whole = measured(cache)
    effects: list[tuple[str, float]] = []
    if by_layer:
        effects = _without_each(ours, theirs, lambda: measured(cache).kl)
        if cache:
            effects.append(("(cache)", measured(None).kl))
    most = whole.kl
    rows = [LayerEffect(name, kl, (most - kl) / most) for name, kl in effects if most]
    return Parity(
        train=trainer.name,
        rollout=engine.name,
        cache=cache or "",
        bound=float(bound),
        **whole._asdict(),
        layers=sorted(rows, key=lambda row: (math.isnan(row.kl), row.kl)),
    )


def _without_each(
    ours: nn.Module, theirs: nn.Module, measure: Callable[[], float]
) -> list[tuple[str, float]]:
    """(layer, what ``measure`` returns with that layer of ``ours`` in ``theirs``)."""
    measured = []
    trained = dict(ours.named_modules())
    places: dict[nn.Module, list[str]] = {}
    for name, layer in theirs.named_modules(remove_duplicate=False):
        places.setdefault(layer, []).append(name)
    for layer, names in places.items():
        name = names[0]
        other = trained[name]
        changed = any(isinstance(x, Converted | Shared) for x in (layer, other))
        if not name or not changed:
            continue
        try:
            for place in names:
                theirs.set_submodule(place, other)
            measured.append((name, measure()))
        finally:
            for place in names:
                theirs.set_submodule(place, layer)
    return measured
