"""The two sides of a comparison: a model as its trainer and as an inference engine compute it, and
how far their next-token distributions are apart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...adapters.transformers import is_pretrained, rounding_cache
from ...common.copies import sharing_copy
from ...common.step import evaluating, seeded
from ...common.validation import check_choice, check_name
from ...layers.calibrate import calibrate
from ...layers.convert import convert, revert_layers
from ...layers.settings import change_settings, converted
from ...recipes.policy import Policy, as_policy, name_of
from ...recipes.recipe import AUTO, RECIPES, Recipe
from ...recipes.tensor_cores import SUMS
from .devices import ONE, Devices
from .engines import ENGINES, Engine
from .epilogue import set_epilogue
from .norms import norms_of_engine

Given = str | Recipe | Policy | Engine
"""What a caller gives for one side."""


@dataclass(frozen=True)
class Side:
    """How one side computes. policy: of the casts; None: those that the model has. engine: whose
    norms it has; None: the model's. sums: `Recipe.accumulate` of recipes that state none; None:
    those of torch. name: in reports. devices: those that share its layers."""

    policy: Policy | None
    engine: Engine | None
    sums: str | None
    name: str
    devices: Devices = ONE

    @staticmethod
    def of(given: Given | None, sums: str | None) -> Side:
        """The side that a caller names. Raises ValueError for an unknown name."""
        if sums is not None:
            check_choice("sums", sums, SUMS)
        if given is None:
            return Side(None, None, sums, "as it is")
        if isinstance(given, str):
            check_name("policy", given, (AUTO, *RECIPES, *ENGINES))
            given = ENGINES.get(given, given)
        if isinstance(given, Engine):
            return Side(Policy(given.recipe), given, sums, given.name)
        policy = as_policy(given)
        name = policy.name or name_of(policy.recipe)
        if policy.selects and not policy.name:
            name = f"{name}, by layer"
        return Side(policy, None, sums, name)

    def shared(
        self,
        model: nn.Module,
        count: int,
        split: Iterable[str] | None,
        engine: Engine | None,
    ) -> Side:
        """The side on ``count`` devices. engine: whose reduction it has unless it is one."""
        engine = self.engine or engine
        reduction = "once" if engine is None else engine.reduction
        devices = Devices.of(model, count, split, reduction)
        name = self.name
        if count > 1:
            name = f"{name} on {count} devices"
        return replace(self, devices=devices, name=name)

    def of_model(self, model: nn.Module, ids: Tensor) -> nn.Module:
        """A copy of a model that computes so, and shares its parameters. ids: a prompt on which
        static scales are measured."""
        copied = sharing_copy(model)
        if self.policy is not None:
            copied = revert_layers(copied)
            # `convert` warns of a policy that casts nothing, which is high precision here.
            if any(recipe is not None for recipe in self.policy.recipes):
                copied = convert(copied, self.policy)
            calibrate_static(copied, ids)
        set_sums(copied, self.sums)
        if self.engine is not None:
            set_epilogue(copied, self.engine.epilogue)
            norms_of_engine(copied, self.engine)
        self.devices.share(copied)
        return copied


def set_sums(model: nn.Module, sums: str | None) -> None:
    """Gives the converted layers of a model sums, unless their recipe states some or casts formats
    that have none."""
    for layer in converted(model).values():
        recipe = layer.fp8_recipe
        # Such recipes have the sums of torch.
        if sums is not None and recipe.accumulate is None:
            with suppress(ValueError):
                change_settings(layer, recipe=replace(recipe, accumulate=sums))


def calibrate_static(model: nn.Module, ids: Tensor) -> None:
    """Sets the static scales of a converted model on one prompt."""
    casts = (c for layer in converted(model).values() for c in layer.fp8_recipe.casts)
    if any(cast and cast.scaling == "static" for cast in casts):
        # Any loss of all logits: an engine's scales of activations do not depend on it.
        with evaluating(model):
            calibrate(model, ids, lambda y: checked_logits(y, ids).logsumexp(-1).mean())


def checked_prompts(prompts: Tensor | Iterable[Tensor]) -> list[Tensor]:
    """The prompts as a list. Raises TypeError and ValueError as `fp8.parity`."""
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


def check_cache(model: nn.Module, cache: str | None) -> None:
    """Raises ValueError for a cache of a model that is none of transformers."""
    if cache is not None and not is_pretrained(model):
        kind = type(model).__name__
        raise ValueError(f"cache is for models of transformers, not a {kind}")


@torch.no_grad()
def logits_of(
    model: nn.Module, prompts: Sequence[Tensor], cache: str | None = None
) -> list[Tensor]:
    """The logits of each prompt, in evaluation mode. cache: as in `fp8.parity`."""
    logits = []
    # Stochastic rounding draws the same bits for both.
    with evaluating(model), seeded(0):
        for ids in prompts:
            options = {}
            if cache is not None:
                options = rounding_cache(model, cache)
            logits.append(checked_logits(model(ids, **options), ids))
    return logits


def checked_logits(output: object, ids: Tensor) -> Tensor:
    """The logits in an output. Raises ValueError for another shape."""
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


class Measures(NamedTuple):
    """The figures that the logits of both sides give, as `fp8.lab.parity.parity.Parity` has
    them."""

    kl: float
    ess: float
    changed: float
    differences: list[list[float]]


def measures(
    ours: list[Tensor], theirs: list[Tensor], prompts: list[Tensor]
) -> Measures:
    """The figures for the logits of a trainer and of an engine, computed in float64."""
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
    return Measures(
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
