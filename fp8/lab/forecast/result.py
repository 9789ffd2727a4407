"""The result of `fp8.forecast`: a training step on an accelerator under several policies."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ...common.report import as_table
from ...recipes.policy import LayerRule, Policy
from ..hardware import BF16

__all__ = ["Forecast", "Variant"]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A training step, forward and backward, under one policy.

    Attributes:
        recipe: the name of the policy; "bf16" for the model as it is.
        seconds: at the rates that large kernels reach (`fp8.lab.hardware.ACHIEVED`).
        layers: layer -> seconds of its products and casts alone, by the sizes of its products; {}
            for torchao's recipes.
        flops: of all products and attention.
        saved: bytes stored for the backward pass, without parameters.
        simulated: why products are not those of FP8 kernels; "" if they are.
        policy: `fp8.Policy.to_dict`; {} for the model as it is and for torchao's recipes.
        peak: seconds at the rates of the data sheet. This and what follows the compiler alone
            tells.
        kernels: the number of kernels.
        fp8, high: the numbers of products with FP8 operands, and with wider ones.
        moved: bytes that kernels beside products and attention read and write.
    """

    recipe: str
    seconds: float
    layers: Mapping[str, float] = field(default_factory=dict)
    flops: int = 0
    saved: int = 0
    simulated: str = ""
    policy: Mapping[str, Any] = field(default_factory=dict)
    peak: float = 0.0
    kernels: int = 0
    fp8: int = 0
    high: int = 0
    moved: int = 0


@dataclass(frozen=True)
class Forecast:
    """The result of `forecast`. It prints as a table.

    Attributes:
        hardware: a name in `fp8.lab.hardware.HARDWARE`.
        source: "compiler", or "estimate" where torch cannot compile for a GPU.
        variants: the model as it is, then the recipes.
        notes: what was not seen.
    """

    hardware: str
    source: str
    variants: tuple[Variant, ...]
    notes: tuple[str, ...] = ()

    def __contains__(self, recipe: str) -> bool:
        return any(variant.recipe == recipe for variant in self.variants)

    def __getitem__(self, recipe: str) -> Variant:
        for variant in self.variants:
            if variant.recipe == recipe:
                return variant
        names = ", ".join(variant.recipe for variant in self.variants)
        raise KeyError(f"no forecast of {recipe!r}; there are {names}")

    def ratio(self, recipe: str) -> float:
        """The time under a recipe relative to that of the model as it is."""
        return self[recipe].seconds / self[BF16].seconds

    def slower(self, recipe: str) -> list[str]:
        """The layers that take longer under a recipe than as they are, alone."""
        high, low = self[BF16].layers, self[recipe].layers
        return [name for name in low if low[name] > high[name]]

    def policy(self, recipe: str) -> Policy:
        """The policy of a variant, without the layers that it makes slower.

        Raises:
            KeyError: for an unknown recipe.
            ValueError: for one of torchao, and for the model as it is.
        """
        variant = self[recipe]
        if not variant.policy:
            raise ValueError(f"{recipe!r} is no policy of fp8")
        policy = Policy.from_dict(dict(variant.policy))
        slower = (LayerRule(name) for name in self.slower(recipe))
        return replace(policy, rules=(*policy.rules, *slower))

    def table(self) -> str:
        """The variants as a text table; of an estimate without what the compiler alone tells."""
        heads: tuple[str, ...] = (
            "recipe",
            "ms",
            "of bf16",
            "layers slower",
            "MB saved",
        )
        compiled = ("at peak", "kernels", "products FP8 / other", "MB moved")
        if self.source == "compiler":
            heads += compiled
        rows = (self._cells(variant)[: len(heads)] for variant in self.variants)
        return as_table([heads, *rows])

    def _cells(self, variant: Variant) -> tuple[str, ...]:
        high, slower = self.variants[0], "-"
        if variant is not high and variant.layers:
            slower = f"{len(self.slower(variant.recipe))} of {len(variant.layers)}"
        return (
            variant.recipe,
            f"{1e3 * variant.seconds:.3g}",
            f"{variant.seconds / high.seconds:.3f}",
            slower,
            f"{variant.saved / 1e6:.0f}",
            f"{variant.peak / (high.peak or 1):.3f}",
            str(variant.kernels),
            f"{variant.fp8} / {variant.high}",
            f"{variant.moved / 1e6:.0f}",
        )

    def to_json(self) -> str:
        """All figures as JSON."""
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Forecast:
        """The forecast of `dataclasses.asdict`, also after JSON."""
        variants = tuple(Variant(**row) for row in values["variants"])
        return Forecast(
            values["hardware"], values["source"], variants, tuple(values["notes"])
        )

    def __str__(self) -> str:
        title = f"{self.hardware}, from the {self.source}'s code, not measured"
        if self.source != "compiler":
            title = f"{self.hardware}, an estimate from the shapes of products, not measured"
        simulated = (v for v in self.variants if v.simulated)
        reasons = [f"{v.recipe}: simulated, {v.simulated}" for v in simulated]
        return "\n".join([title, self.table(), *reasons, *self.notes])

    __repr__ = __str__
