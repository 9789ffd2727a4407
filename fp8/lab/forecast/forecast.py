"""`fp8.forecast`: the time of a training step on a GPU, from the code that the compiler makes."""

from __future__ import annotations

import copy
import json
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ...common.libraries import need
from ...common.mixin import check_module
from ...common.report import as_table
from ...common.step import Batch, Loss, call, loss_value, unwrapped
from ...native import selftest
from ...native.product import why_not_recipe
from ...recipes.history import has_scales, histories
from ...recipes.policy import Policy, Rule, as_policy, name_of, recipe_of
from ...recipes.recipe import Recipe
from ...selection.policies import resolve
from ...surgery.convert import convert, report
from ..hardware import BF16, LAUNCH, Hardware, estimate, get_hardware
from ..trace import trace
from .card import CARDS, compiling_for, why_not
from .compiled import OTHER, TRITON, Graph, Kernel, graphs

__all__ = ["Forecast", "Variant", "forecast", "kernel_seconds"]

TORCHAO = "torchao "
"""Prefix of torchao's recipes among those to compare: "torchao tensorwise"."""

RECIPES = ("unit", "tensor", "row")
"""The recipes that a forecast compares by default."""

UNSEEN = (
    "not seen: autotuning, the rate of FP8 products without fast accumulation (which some kernels "
    "lack), gaps between launches, communication, the optimizer"
)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A training step, forward and backward, under one policy.

    Attributes:
        recipe: the name of the policy; "bf16" for the model as it is.
        kernels: the number of kernels.
        fp8, high: the numbers of products with FP8 operands, and with wider ones.
        flops: of all products and attention.
        moved: bytes that kernels beside products and attention read and write.
        saved: bytes stored for the backward pass, without parameters.
        peak: seconds at the rates of the data sheet.
        seconds: at the rates that large kernels reach (`fp8.lab.hardware.ACHIEVED`); no kernel
            takes less than `fp8.lab.hardware.LAUNCH`.
        layers: layer -> seconds of its products and casts, compiled alone.
        simulated: why products are not those of FP8 kernels; "" if they are.
        policy: `fp8.Policy.to_dict`; {} for the model as it is and for torchao's recipes.
    """

    recipe: str
    kernels: int = 0
    fp8: int = 0
    high: int = 0
    flops: int = 0
    moved: int = 0
    saved: int = 0
    peak: float = 0.0
    seconds: float = 0.0
    layers: Mapping[str, float] = field(default_factory=dict)
    simulated: str = ""
    policy: Mapping[str, Any] = field(default_factory=dict)


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
        """The layers that take longer under a recipe than as they are, compiled alone."""
        high, low = self[BF16].layers, self[recipe].layers
        return [name for name in low if low[name] > high[name]]

    def policy(self, recipe: str) -> Policy:
        """The policy of a variant, without the layers that it makes slower.

        Raises:
            KeyError: for an unknown recipe.
            ValueError: for one of torchao, and if the layers were not forecast.
        """
        variant = self[recipe]
        if not variant.policy:
            raise ValueError(f"{recipe!r} is no policy of fp8")
        if not variant.layers:
            raise ValueError("no layers were forecast: call fp8.forecast with layers=True")
        policy = Policy.from_dict(dict(variant.policy))
        slower = (Rule(name) for name in self.slower(recipe))
        return replace(policy, rules=(*policy.rules, *slower))

    def table(self) -> str:
        """The variants as a text table."""
        heads = ("recipe", "ms", "of bf16", "at peak", "kernels", "products FP8 / other")
        rows: list[tuple[str, ...]] = [(*heads, "MB moved", "MB saved", "layers slower")]
        for v in self.variants:
            slower = f"{len(self.slower(v.recipe))} of {len(v.layers)}" if v.layers else "-"
            compiled: tuple[str, ...] = (
                f"{v.peak / self[BF16].peak:.3f}",
                str(v.kernels),
                f"{v.fp8} / {v.high}",
                f"{v.moved / 1e6:.0f}",
                f"{v.saved / 1e6:.0f}",
            )
            if self.source != "compiler":  # shapes do not tell
                compiled = ("-",) * 5
            ratio = f"{v.seconds / self[BF16].seconds:.3f}"
            slower = "-" if v.recipe == BF16 else slower
            rows.append((v.recipe, f"{1e3 * v.seconds:.3g}", ratio, *compiled, slower))
        return as_table(rows)

    def to_json(self) -> str:
        """All figures as JSON."""
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Forecast:
        """The forecast of `dataclasses.asdict`, also after JSON."""
        variants = tuple(Variant(**row) for row in values["variants"])
        return Forecast(**{**values, "variants": variants, "notes": tuple(values["notes"])})

    def __str__(self) -> str:
        title = f"{self.hardware}, from the {self.source}'s code, not measured"
        if self.source != "compiler":
            title = f"{self.hardware}, an estimate from the shapes of products, not measured"
        reasons = [f"{v.recipe}: simulated, {v.simulated}" for v in self.variants if v.simulated]
        return "\n".join([title, self.table(), *reasons, *self.notes])

    __repr__ = __str__


def forecast(
    model: nn.Module,
    batch: Batch,
    loss: Loss | None = None,
    *,
    recipes: Sequence[str | Recipe | Policy] = RECIPES,
    hardware: str | Hardware = "h100",
    layers: bool = True,
    options: Mapping[str, Any] | None = None,
) -> Forecast:
    """Forecasts the time of a training step on a GPU that is not there.

    torch.compile compiles the forward and the backward pass for the GPU, from fake tensors; what
    each kernel reads, writes and multiplies gives its time by a roofline. Nothing is allocated and
    nothing runs: a model on the meta device serves. It takes a CUDA build of torch and no driver.
    With a CPU build it is an `fp8.lab.hardware.estimate` from the shapes of the products.

    Args:
        model: a plain model, on any device. It is not changed.
        batch: a tensor, a tuple or list of positional arguments, or a mapping of keyword arguments.
            Only shapes and dtypes matter.
        loss: a function of the output. None: the backward pass starts from the output.
        recipes: recipes or policies to convert the model to, as `fp8.convert` does, and names of
            torchao's recipes for training ("torchao tensorwise"). Static scales count as
            calibrated.
        hardware: a name in `fp8.lab.hardware.HARDWARE`, or a row. The compiler knows those of
            `fp8.lab.forecast.card.CARDS`.
        layers: whether to compile each kind of layer alone too, for `Forecast.slower`. Its casts
            are not fused with neighbours then, so that a loss is more likely than in the model.
        options: those of torch.compile.

    Returns:
        A `Forecast`.

    Raises:
        ValueError: for an unknown recipe or hardware.
        TypeError: if ``model`` is not a module.
        ImportError: for a recipe of torchao without torchao.
    """
    check_module("forecast", model)
    model, device = unwrapped(model), get_hardware(hardware)
    converters = [_Converter(BF16), *map(_Converter.of, recipes)]
    reason = why_not()
    if device.name not in CARDS:
        reason = f"the compiler's view of {device.name} is not known, only of {', '.join(CARDS)}"
    if reason:
        return _estimated(model, batch, converters, device, reason)
    with compiling_for(CARDS[device.name]), selftest.trusted(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = _Step(_absent(model), pytree.tree_map(_on_card, batch), loss, options)
        variants = [step.variant(converter, device, layers) for converter in converters]
    return Forecast(device.name, "compiler", tuple(variants), (UNSEEN,))


class _Converter(NamedTuple):
    """What a variant makes of a model; without ``policy`` and ``torchao``, nothing."""

    name: str
    policy: Policy | None = None
    torchao: str = ""

    @staticmethod
    def of(recipe: str | Recipe | Policy) -> _Converter:
        if isinstance(recipe, str) and recipe.startswith(TORCHAO):
            need("torchao")
            return _Converter(recipe, torchao=recipe.removeprefix(TORCHAO))
        policy = as_policy(recipe)
        return _Converter(policy.name or name_of(policy.recipe), policy)

    def __call__(self, model: nn.Module) -> nn.Module:
        if self.torchao:
            float8 = import_module("torchao.float8")
            config = float8.Float8LinearConfig.from_recipe_name(self.torchao)
            converted: nn.Module = float8.convert_to_float8_training(model, config=config)
            return converted
        if self.policy is not None:
            model = convert(model, self.policy)
        return model

    @property
    def described(self) -> dict[str, Any]:
        """The fields of a `Variant` that are known before it is compiled."""
        if self.policy is None:
            return {"recipe": self.name}
        recipes = map(recipe_of, self.policy.recipes)
        whys = (why_not_recipe(recipe) for recipe in recipes if recipe is not None)
        simulated = next(filter(None, whys), "")
        return {"recipe": self.name, "policy": self.policy.to_dict(), "simulated": simulated}


class _Step:
    """A model and a batch of fake tensors, whose step is compiled under recipes."""

    def __init__(
        self, model: nn.Module, batch: Batch, loss: Loss | None, options: Mapping[str, Any] | None
    ) -> None:
        self.model, self.batch, self.loss, self.options = model, batch, loss, options
        self._alone: dict[Any, float] = {}
        self._calls: Counter[str] = Counter()
        self._inputs: dict[str, Tensor] = {}

    def variant(self, converter: _Converter, device: Hardware, layers: bool) -> Variant:
        model = converter(copy.deepcopy(self.model, _same(self.model)))
        recipes = converter.policy.recipes if converter.policy else ()
        if any(isinstance(recipe, Recipe) and recipe.keeps_history for recipe in recipes):
            _calibrated(model, self._of_layers())

        def run(batch: Batch) -> Any:
            output = call(model, batch)
            return output if self.loss is None else loss_value(output, self.loss)

        compiled = graphs(run, self.batch, options=self.options)
        times = self._layers(model, converter.name, device) if layers else {}
        return Variant(**converter.described, **_summed(compiled, device), layers=times)

    def _layers(self, model: nn.Module, recipe: str, device: Hardware) -> dict[str, float]:
        """Layer -> seconds of all its calls, compiled alone, once for each kind."""
        inputs = self._of_layers()
        modules = dict(model.named_modules())
        times = {}
        for name, x in inputs.items():
            layer = modules[name]
            kind = (recipe, repr(layer), x.shape, x.dtype)
            if kind not in self._alone:
                alone = graphs(layer, x.detach().requires_grad_(), options=self.options)
                kernels = [kernel for graph in alone for kernel in graph.kernels]
                self._alone[kind] = sum(kernel_seconds(kernel, device) for kernel in kernels)
            times[name or "(model)"] = self._calls[name] * self._alone[kind]
        return times

    def _of_layers(self) -> dict[str, Tensor]:
        """The layers that `fp8.convert` casts, by name, with what they receive."""
        if not self._inputs:
            rows = report(convert(copy.deepcopy(self.model, _same(self.model)), "tensor"))
            names = {row.path for row in rows if not row.left_alone}

            def note(name: str) -> Callable[[nn.Module, Any], None]:
                def hook(module: nn.Module, args: Any) -> None:
                    self._calls[name] += 1
                    self._inputs[name] = args[0]

                return hook

            hooks = [
                module.register_forward_pre_hook(note(name))
                for name, module in self.model.named_modules()
                if name in names
            ]
            with torch.no_grad():
                call(self.model, self.batch)
            for hook in hooks:
                hook.remove()
        return self._inputs


def kernel_seconds(kernel: Kernel, device: Hardware, peak: bool = False) -> float:
    """The time of a kernel by the roofline. peak: at the rates of the data sheet."""
    unit = "fp8" if kernel.kind == "fp8" else "bf16"
    rate = device.peak[unit] if peak else device.rate(unit)
    rate /= 2 if kernel.kind == "fp32" else 1  # of TF32
    stream = device.bandwidth if peak else device.stream
    seconds = max(kernel.flops / rate, kernel.moved / stream)
    return seconds if peak else max(seconds, LAUNCH)


def _summed(compiled: Sequence[Graph], device: Hardware) -> dict[str, Any]:
    """The fields of a `Variant` that its kernels give."""
    kernels = [kernel for graph in compiled for kernel in graph.kernels]
    kinds = Counter(kernel.kind for kernel in kernels)
    return {
        "kernels": len(kernels),
        "fp8": kinds["fp8"],
        "high": kinds["bf16"] + kinds["fp32"],
        "flops": sum(kernel.flops for kernel in kernels),
        "moved": sum(kernel.moved for kernel in kernels if kernel.kind in (TRITON, OTHER)),
        "saved": sum(graph.saved for graph in compiled),
        "peak": sum(kernel_seconds(kernel, device, peak=True) for kernel in kernels),
        "seconds": sum(kernel_seconds(kernel, device) for kernel in kernels),
    }


# Fake tensors


def _on_card(x: Any) -> Any:
    """A fake tensor on "cuda" like ``x``; ``x`` itself if it is no tensor."""
    if not isinstance(x, Tensor):
        return x
    new = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")
    return new.requires_grad_(x.requires_grad)


def _absent(model: nn.Module) -> nn.Module:
    """A copy of the model whose parameters and buffers are fake tensors on "cuda"."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        new = _on_card(tensor.detach())
        if isinstance(tensor, nn.Parameter):
            new = nn.Parameter(new, tensor.requires_grad)
        vars(new).update(vars(tensor))
        memo[id(tensor)] = new
    return copy.deepcopy(model, memo)


def _same(model: nn.Module) -> dict[int, Any]:
    """The memo of a copy that has the parameters and buffers of the model."""
    return {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}


def _calibrated(model: nn.Module, inputs: Mapping[str, Tensor]) -> None:
    """Notes states of layers as set, and shared, as `fp8.calibrate` or a step leaves them."""
    scales: dict[int, Tensor] = {}
    for name, x in inputs.items():
        layer: Any = model.get_submodule(name)
        if not hasattr(layer, "fp8_measured"):  # a policy leaves it alone
            continue
        measured = vars(layer.fp8_measured)
        measured.update(dict.fromkeys(histories(layer, recurse=False), True))
        if has_scales(layer):
            scale = scales.setdefault(id(x), layer.fp8_scale_input)
            measured["fp8_scale_input"] = True if scale is layer.fp8_scale_input else scale


# Without a compiler for GPUs


def _estimated(
    model: nn.Module,
    batch: Batch,
    converters: Sequence[_Converter],
    device: Hardware,
    reason: str,
) -> Forecast:
    """From the shapes of products alone; torchao's recipes are left out."""
    products = trace(model, batch)
    cast = {product.layer for product in products if not product.why_not}
    variants = []
    for converter in converters:
        if converter.torchao:
            continue
        policy = converter.policy or Policy(None)
        decided = {name or "(model)": d.recipe for name, d in resolve(policy, model).items()}
        result = estimate(products, {n: r for n, r in decided.items() if n in cast}, device)
        variants.append(
            Variant(
                **converter.described | {"simulated": result.why_not},
                flops=3 * sum(product.flops for product in products),
                peak=result.step,
                seconds=result.step,
                layers={time.layer: time.low for time in result.layers if time.layer in cast},
            )
        )
    return Forecast(device.name, "estimate", tuple(variants), (reason,))
