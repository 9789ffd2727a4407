"""`fp8.parity`: one checkpoint under the policies of its trainer and of an inference engine.

Reinforcement learning samples with an engine and trains on what it sampled. If the two compute
different probabilities, updates are off-policy by that difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...adapters.transformers import is_pretrained, rounding_cache
from ...common.copies import sharing_copy
from ...common.report import as_table, finite
from ...common.step import evaluating, seeded, unwrapped
from ...common.validation import check_flag, check_module, check_name, check_number
from ...layers.calibrate import calibrate
from ...layers.convert import convert, revert_layers
from ...layers.settings import Converted, converted
from ...recipes.cast import Cast
from ...recipes.policy import Policy, as_policy, name_of
from ...recipes.recipe import AUTO, RECIPES, Recipe

__all__ = ["ENGINES", "LayerEffect", "Parity", "parity"]


def _engine(name: str, activations: Cast, weights: str, **options: Any) -> Recipe:
    weight = Cast(format="e4m3", scaling=weights, rule="exact", **options)
    return Recipe(name=name, input=activations, weight=weight)


ENGINES: dict[str, Recipe] = {
    engine.name: engine
    for engine in (
        # compressed-tensors' presets FP8_DYNAMIC and FP8: a scale is the largest magnitude / 448.
        _engine("engine_row", Cast(format="e4m3", scaling="row", rule="exact"), "row"),
        _engine("engine_static", Cast(format="e4m3", scaling="static"), "tensor"),
        # As DeepSeek-V3 (arXiv:2412.19437, section 3.3.2) is served.
        _engine(
            "engine_block",
            Cast(format="e4m3", scaling="block", rule="exact"),
            "block",
            tile=(128, 128),
        ),
    )
}
"""Name -> the casts of an inference engine: activations by token, at a static scale or by block;
weights by output channel, tensor or block."""


class LayerEffect(NamedTuple):
    """The difference with one layer of the trainer in the engine's model. name: of the layer;
    "(cache)": the cache of keys and values. kl: as `Parity.kl`. share: by how much it is less."""

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
    train: str | Recipe | Policy | None = None,
    rollout: str | Recipe | Policy = "engine_row",
    bound: float,
    cache: str | None = None,
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
        rollout: the engine's, likewise, or a name in `ENGINES`. Static scales are measured on the
            first prompt, by `fp8.calibrate`; so are those of ``train`` unless it is None.
        bound: the largest KL(rollout || train), in nats per token, that is accepted.
        cache: the scaling of a cache of keys and values in FP8 in the engine
            (`fp8.adapters.transformers.KV_SCALINGS`); None: no such cache. Models of transformers
            only.
        by_layer: whether to measure each layer, which takes a pass over the prompts for each.

    Raises:
        TypeError: if ``model`` is not a module, and for prompts that are not tensors of int64.
        ValueError: for an unknown recipe, prompts of fewer than two tokens or none, a bound that is
            negative or NaN, a cache for a model that is not of transformers, and logits of another
            shape.
    """
    check_module("parity", model)
    check_number("bound", bound)
    check_flag("by_layer", by_layer)
    if not bound >= 0:
        raise ValueError(f"bound must be 0 or larger, got {bound!r}")
    model, ids = unwrapped(model), _checked(prompts)
    if cache is not None and not is_pretrained(model):
        raise ValueError(
            f"cache is for models of transformers, not a {type(model).__name__}"
        )
    trainer = None if train is None else _policy(train)
    engine = _policy(rollout)
    # Copies, as the effect of a layer is measured by putting one of ours in the place of theirs.
    ours, theirs = (_under(model, policy, ids[0]) for policy in (trainer, engine))
    wanted = _logits(ours, ids, None)

    def measured(cache: str | None) -> _Measures:
        return _measures(wanted, _logits(theirs, ids, cache), ids)

    whole = measured(cache)
    effects: list[tuple[str, float]] = []
    if by_layer:
        effects = _without_each(ours, theirs, lambda: measured(cache).kl)
        if cache:
            effects.append(("(cache)", measured(None).kl))
    most = whole.kl
    rows = [LayerEffect(name, kl, (most - kl) / most) for name, kl in effects if most]
    return Parity(
        train=_name(trainer),
        rollout=_name(engine),
        cache=cache or "",
        bound=float(bound),
        **whole._asdict(),
        layers=sorted(rows, key=lambda row: (math.isnan(row.kl), row.kl)),
    )


def _checked(prompts: Tensor | Iterable[Tensor]) -> list[Tensor]:
    ids = [prompts] if isinstance(prompts, Tensor) else list(prompts)
    if not ids:
        raise ValueError("parity needs prompts, got none")
    for each in ids:
        if not isinstance(each, Tensor) or each.dtype != torch.int64:
            got = getattr(each, "dtype", type(each).__name__)
            raise TypeError(f"a prompt is a tensor of int64, got {got}")
        if each.dim() not in (1, 2) or each.shape[-1] < 2 or not each.numel():
            raise ValueError(
                "a prompt has the shape (tokens,) or (batch, tokens) with two tokens or more, got "
                f"{tuple(each.shape)}"
            )
    return ids


def _policy(given: str | Recipe | Policy) -> Policy:
    if isinstance(given, str):
        check_name("policy", given, (AUTO, *RECIPES, *ENGINES))
        return Policy(ENGINES.get(given, given))
    return as_policy(given)


def _name(policy: Policy | None) -> str:
    if policy is None:
        return "as it is"
    if policy.name or not policy.selects:
        return policy.name or name_of(policy.recipe)
    return f"{name_of(policy.recipe)}, by layer"


def _under(model: nn.Module, policy: Policy | None, ids: Tensor) -> nn.Module:
    """A copy under a policy that shares the parameters."""
    copied = sharing_copy(model)
    if policy is None:
        return copied
    copied = revert_layers(copied)
    if any(recipe is not None for recipe in policy.recipes):
        copied = convert(copied, policy)
    casts = (c for layer in converted(copied).values() for c in layer.fp8_recipe.casts)
    if any(cast and cast.scaling == "static" for cast in casts):
        # Any loss of all logits: an engine's scales of activations do not depend on it.
        with evaluating(copied):
            calibrate(
                copied, ids, lambda y: _checked_logits(y, ids).logsumexp(-1).mean()
            )
    return copied


@torch.no_grad()
def _logits(
    model: nn.Module, prompts: Sequence[Tensor], cache: str | None
) -> list[Tensor]:
    logits = []
    # Stochastic rounding draws the same bits for both.
    with evaluating(model), seeded(0):
        for ids in prompts:
            options = {}
            if cache is not None:
                options = rounding_cache(model, cache)
            logits.append(_checked_logits(model(ids, **options), ids))
    return logits


def _checked_logits(output: object, ids: Tensor) -> Tensor:
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor) or logits.shape[:-1] != ids.shape:
        got: object = type(output).__name__
        if isinstance(logits, Tensor):
            got = tuple(logits.shape)
        raise ValueError(
            f"for ids of shape {tuple(ids.shape)} the model must return logits of shape (..., "
            f"tokens, vocabulary), as a tensor or in .logits, got {got}"
        )
    return logits


class _Measures(NamedTuple):
    """The fields of a `Parity` that the logits give."""

    kl: float
    ess: float
    changed: float
    differences: list[list[float]]


def _measures(
    ours: list[Tensor], theirs: list[Tensor], prompts: list[Tensor]
) -> _Measures:
    divergences, squares, changes, differences = [], [], [], []
    for train, rollout, ids in zip(ours, theirs, prompts, strict=True):
        dtype = torch.float64
        if ids.device.type == "mps":  # which has no float64
            dtype = torch.float32
        log_p, log_q = (x.to(dtype).log_softmax(-1) for x in (rollout, train))
        # The ratio is 1 where both are -Inf.
        ratio = torch.where(log_q == log_p, 0.0, log_q - log_p)
        divergences.append(-_expected(log_p, ratio).flatten())
        # E[(train / rollout)**2] over tokens of the engine: E[train / rollout] over the trainer's.
        squares.append(_expected(log_q, ratio.exp()).flatten())
        changes.append((rollout.argmax(-1) != train.argmax(-1)).flatten())
        of_tokens = -ratio[..., :-1, :].gather(-1, ids[..., 1:, None]).squeeze(-1)
        differences += of_tokens.reshape(-1, of_tokens.shape[-1]).tolist()
    return _Measures(
        kl=float(torch.cat(divergences).mean()),
        ess=1 / float(torch.cat(squares).mean()),
        changed=float(torch.cat(changes).double().mean()),
        differences=differences,
    )


def _expected(log_p: Tensor, value: Tensor) -> Tensor:
    """The expected ``value`` under a distribution; values at probability zero do not count."""
    p = log_p.exp()
    # 0 * Inf is NaN: of a token that has a logit of -Inf.
    return torch.where(p == 0, 0.0, p * value).sum(-1)


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
        casts = isinstance(layer, Converted) or isinstance(other, Converted)
        if not name or not casts:
            continue
        try:
            for place in names:
                theirs.set_submodule(place, other)
            measured.append((name, measure()))
        finally:
            for place in names:
                theirs.set_submodule(place, layer)
    return measured
