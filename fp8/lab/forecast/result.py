"""The result of `fp8.forecast`: a training step on an accelerator under several policies."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ...common.report import as_table
from ...recipes.policy import LayerRule, Policy
from ..hardware import BF16

__all__ = ["Forecast", "Memory", "OptimizerMemory", "Variant"]


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The bytes of a forward and a backward pass in eager mode.

    Attributes:
        weights: parameters and buffers; what is shared counts once.
        batch: the tensors of the batch.
        gradients: gradients of parameters, and of the batch if it requires one.
        casts: FP8 copies of activations that the forward pass keeps for the backward pass.
        copies: tensors computed from weights alone and saved: their FP8 copies.
        activations: all other saved tensors.
        peak: the most that is alive at once, all of these and temporary tensors.
    """

    weights: int
    batch: int
    gradients: int
    casts: int
    copies: int
    activations: int
    peak: int

    @property
    def kept(self) -> int:
        """What the forward pass keeps for the backward pass."""
        return self.casts + self.copies + self.activations


@dataclass(frozen=True)
class OptimizerMemory:
    """The bytes of a model that an optimizer steps.

    Attributes:
        weights, gradients: as stored at a level of `fp8.initialize`.
        state: "first_moment", "second_moment", "master", "step" -> bytes.
        step: the most that is alive at once while the optimizer steps, all of these and temporary
            tensors.
    """

    weights: int
    gradients: int
    state: Mapping[str, int]
    step: int

    @property
    def total_state(self) -> int:
        """Bytes of the state."""
        return sum(self.state.values())


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A training step, forward and backward, under one policy.

    Attributes:
        recipe: the name of the policy; "bf16" for the model as it is.
        seconds: at the rates that kernels reach under load (`fp8.lab.hardware`).
        layers: layer -> seconds of its products and casts alone, by the sizes of its products; {}
            for torchao's recipes.
        flops: the FLOPs of all products and attention.
        saved: bytes stored for the backward pass, without parameters.
        simulated: why no FP8 kernel computes the products; "" if one does.
        policy: `fp8.Policy.to_dict`; {} for the model as it is and for torchao's recipes.
        peak: seconds at the rates of the data sheet. This and what follows the compiler alone
            tells.
        kernels: the number of kernels.
        fp8, high: the numbers of products with FP8 operands, and with wider ones.
        moved: bytes that kernels beside products and attention read and write.
        memory: the memory in eager mode on the hardware; None if it could not be counted.
        card: seconds of all kernels.
        host: seconds in which the CPU launches them; 0 for CUDA graphs. `seconds` is the larger.
        compiled: the most bytes that are alive at once in a step of compiled code, with the
            workspaces of cuBLAS; 0 where the compiler does not tell.
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
    memory: Memory | None = None
    card: float = 0.0
    host: float = 0.0
    compiled: int = 0

    @property
    def bound(self) -> str:
        """What a step waits for: "launches" or "kernels"."""
        return "launches" if self.host > self.card else "kernels"


@dataclass(frozen=True)
class Forecast:
    """The result of `forecast`. It prints as a table.

    Attributes:
        hardware: a name in `fp8.lab.hardware.HARDWARE`.
        source: "compiler", or "estimate" where torch cannot compile for a GPU.
        variants: the model as it is, then the recipes.
        notes: parts of the step that the forecast leaves out.
        optimizers: name, or level of `fp8.initialize` -> the memory of the model that it steps.
    """

    hardware: str
    source: str
    variants: tuple[Variant, ...]
    notes: tuple[str, ...] = ()
    optimizers: Mapping[str, OptimizerMemory] = field(default_factory=dict)

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
        if self.source == "compiler":
            heads += ("card", "host", "bound by", "at peak", "kernels")
            heads += ("products FP8 / other", "MB moved")
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
            f"{1e3 * variant.card:.3g}",
            f"{1e3 * variant.host:.3g}",
            variant.bound,
            f"{variant.peak / (high.peak or 1):.3f}",
            str(variant.kernels),
            f"{variant.fp8} / {variant.high}",
            f"{variant.moved / 1e6:.0f}",
        )

    def peak(self, recipe: str, optimizer: str = "torch AdamW") -> int:
        """The most bytes of a step in eager mode, under a recipe with an optimizer.

        Args:
            recipe: the recipe of a variant.
            optimizer: a name in `optimizers`; not of a level, whose weights have another format.

        Raises:
            KeyError: for an unknown recipe or optimizer.
            ValueError: if the memory of the recipe was not counted.
        """
        memory = self[recipe].memory
        if memory is None:
            raise ValueError(f"the memory of {recipe!r} was not counted")
        stepped = self.optimizers[optimizer]
        beside = memory.weights - stepped.weights + memory.batch
        return max(memory.peak + stepped.total_state, stepped.step + beside)

    def memory(self) -> str:
        """The memory as two text tables: of recipes, without an optimizer, and of optimizers."""
        kinds = ("weights", "gradients", "casts", "copies", "activations", "peak")
        parts = ("weights", "gradients", "total_state", "step")
        of_compiled: tuple[str, ...] = ("saved", "compiled")
        recipes: list[tuple[str, ...]] = [("GB in eager mode", *kinds)]
        if self.source == "compiler":
            recipes = [(*recipes[0], "compiled: kept", "peak")]
        else:
            of_compiled = ()
        for variant in self.variants:
            if variant.memory is not None:
                values = (*_in_gb(variant.memory, kinds), *_in_gb(variant, of_compiled))
                recipes.append((variant.recipe, *values))
        heads = ("optimizer", "weights", "gradients", "state", "peak of its step")
        optimizers: list[tuple[str, ...]] = [heads]
        for name, memory in self.optimizers.items():
            optimizers.append((name, *_in_gb(memory, parts)))
        return f"{as_table(recipes)}\n\n{as_table(optimizers)}"

    def to_json(self) -> str:
        """All figures as JSON."""
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Forecast:
        """The forecast of `dataclasses.asdict`, also after JSON."""
        variants = []
        for row in values["variants"]:
            memory = row["memory"] and Memory(**row["memory"])
            variants.append(Variant(**{**row, "memory": memory}))
        of = values["optimizers"]
        optimizers = {name: OptimizerMemory(**row) for name, row in of.items()}
        return Forecast(
            values["hardware"],
            values["source"],
            tuple(variants),
            tuple(values["notes"]),
            optimizers,
        )

    def __str__(self) -> str:
        title = f"{self.hardware}, from the {self.source}'s code, not measured"
        if self.source != "compiler":
            title = f"{self.hardware}, an estimate from the shapes of products, not measured"
        simulated = (v for v in self.variants if v.simulated)
        reasons = [f"{v.recipe}: simulated, {v.simulated}" for v in simulated]
        parts = [title, self.table(), *reasons, *self.notes]
        if self.optimizers:
            parts += ["", self.memory()]
        return "\n".join(parts)

    __repr__ = __str__


def _in_gb(memory: object, names: Sequence[str]) -> list[str]:
    return [f"{getattr(memory, name) / 1e9:.3g}" for name in names]
