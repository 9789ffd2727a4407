"""`fp8.forecast`: the time of a training step on a GPU, from the code that the compiler makes."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils import _pytree as pytree

from ...casts.watch import skip_look
from ...common.copies import deep_copy
from ...common.libraries import need
from ...common.step import Batch, Loss, call, described, loss_value, tensors, unwrapped
from ...common.validation import check_module
from ...kernels import selftest
from ...kernels.product import why_not_recipe
from ...layers.convert import convert
from ...layers.policies import resolve
from ...layers.select import check_values_set
from ...recipes.history import has_scales, histories
from ...recipes.policy import Policy, as_policy, name_of, recipe_of
from ...recipes.recipe import Recipe
from ..hardware import BF16, Hardware, get_hardware
from ..trace import Product, trace
from .card import CARDS, compiling_for, why_not
from .compiled import OTHER, TRITON, Graph, graphs
from .estimate import estimate
from .memory import OPTIMIZERS, of_optimizer, of_passes, on_gpu
from .replay import peak
from .result import Forecast, Variant
from .times import Times, times

__all__ = ["forecast"]

# Prefix of torchao's recipes among those to compare: "torchao tensorwise".
TORCHAO = "torchao "

RECIPES = ("unit", "tensor", "row")
"""The recipes that a forecast compares by default."""

UNSEEN = (
    "not seen: the rate of FP8 products without fast accumulation (which some kernels lack), "
    "communication, the optimizer"
)

BYTES_ONLY = "by the bytes of kernels alone, without their instructions"

REPLAYS = "reduce-overhead"
"""The mode of torch.compile in which CUDA graphs replay the kernels, and no CPU launches them."""


def forecast(
    model: nn.Module,
    batch: Batch,
    loss: Loss | None = None,
    *,
    recipes: Sequence[str | Recipe | Policy] = RECIPES,
    hardware: str | Hardware = "h100",
    options: Mapping[str, object] | None = None,
    progress: Callable[[Variant], object] | None = None,
) -> Forecast:
    """Forecasts the time of a training step on a GPU that is not there.

    torch.compile compiles the forward and the backward pass for the GPU, from fake tensors; what
    each kernel reads, writes, multiplies and executes gives its time (docs/forecast.md). Nothing is
    allocated and nothing runs: a model on the meta device serves. It takes a CUDA build of torch
    and no driver. With a CPU build it is an estimate from the sizes of the products
    (docs/slower.md), as the times of single layers always are.

    Args:
        model: a plain model, on any device. It is not changed.
        batch: a tensor, a tuple or list of positional arguments, or a mapping of keyword arguments.
            Only shapes and dtypes matter.
        loss: a function of the output. None: the backward pass starts from the output.
        recipes: recipes or policies to convert the model to, as `fp8.convert` does, and names of
            torchao's recipes for training ("torchao tensorwise"). Static scales count as
            calibrated.
        hardware: a name in `fp8.lab.hardware.HARDWARE`, or a row of your own, which the compiler
            does not know: its forecast is an estimate.
        options: options of torch.compile, or {"mode": "reduce-overhead"}: CUDA graphs launch all
            kernels at once.
        progress: called with each variant when it is known.

    Returns:
        A `Forecast`.

    Raises:
        ValueError: for an unknown recipe or hardware, and before the first call of a model of
            ``unit_scale`` without a batch.
        TypeError: if ``model`` is not a module.
        ImportError: for a recipe of torchao without torchao.
    """
    check_module("forecast", model)
    check_values_set("forecast", model)
    model, device = unwrapped(model), get_hardware(hardware)
    converters = [_Converter(BF16), *map(_Converter.of, recipes)]
    reason = why_not()
    if device.name not in CARDS:
        reason = f"the compiler's view of {device.name} is not known, only of {', '.join(CARDS)}"
    if reason:
        products = trace(model, batch)
        ours = [converter for converter in converters if not converter.torchao]
        variants = [converter.estimated(products, model, device) for converter in ours]
        result = Forecast(device.name, "estimate", tuple(variants), (reason,))
        return _with_memory(result, model, batch, loss, ours)
    settings = dict(options or {})
    replays = settings.get("mode") == REPLAYS
    if replays:
        del settings["mode"]
    products, notes, variants = trace(*_empty(model, batch, "meta")), [UNSEEN], []
    with (
        compiling_for(CARDS[device.name]),
        selftest.trusted(),  # which would run kernels
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        step = _Step(*_empty(model, batch, "cuda"), loss, settings)
        for converter in converters:
            variant = converter.estimated(products, model, device)
            compiled = step.compiled(converter)
            found = times(compiled, device)
            variant = _summed(variant, compiled, found, replays)
            size, why = _peak(step, compiled, notes), converter.simulated
            variants.append(replace(variant, compiled=size, simulated=why))
            if found.uncounted:
                notes.append(f"{variant.recipe}: {BYTES_ONLY}: {found.uncounted}")
            if progress is not None:
                progress(variants[-1])
    result = Forecast(device.name, "compiler", tuple(variants), tuple(notes))
    return _with_memory(result, model, batch, loss, converters)


def _peak(step: _Step, compiled: Sequence[Graph], notes: list[str]) -> int:
    """The most bytes of a step of compiled code; 0, and a note, if its code cannot be run here."""
    try:
        return step.nbytes + peak(compiled, step.loss is None)
    except Exception as error:
        notes.append(_UNCOUNTED.format("compiled code", described(error)))
        return 0


def _with_memory(
    result: Forecast,
    model: nn.Module,
    batch: Batch,
    loss: Loss | None,
    converters: Sequence[_Converter],
) -> Forecast:
    """The forecast with the memory of its variants in eager mode, and of optimizers."""
    notes, variants, optimizers = list(result.notes), [], {}

    def empty() -> _Step:
        return _Step(*_empty(model, batch, "cpu"), loss, None)

    def converted(converter: _Converter) -> tuple[nn.Module, Batch]:
        step = empty()
        return step.converted(converter, "native"), step.batch

    card = CARDS.get(result.hardware, CARDS["h100"])
    with on_gpu(card.capability), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for variant, converter in zip(result.variants, converters, strict=True):
            try:
                memory = of_passes(partial(converted, converter), loss)
                if result.source != "compiler":
                    variant = replace(variant, saved=memory.kept)
                variants.append(replace(variant, memory=memory))
            except Exception as error:  # the time of the model is forecast all the same
                notes.append(_UNCOUNTED.format(variant.recipe, described(error)))
                variants.append(variant)
        for name, optimize in OPTIMIZERS.items():
            try:
                optimizers[name] = of_optimizer(lambda: empty().model, optimize)
            except Exception as error:  # no parameters, or one that no level stores
                notes.append(_UNCOUNTED.format(name, described(error)))
    return replace(
        result, variants=tuple(variants), notes=tuple(notes), optimizers=optimizers
    )


_UNCOUNTED = "{}: memory was not counted: {}"


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

    def __call__(self, model: nn.Module, backend: str = "auto") -> nn.Module:
        if self.torchao:
            float8 = import_module("torchao.float8")
            config = float8.Float8LinearConfig.from_recipe_name(self.torchao)
            return float8.convert_to_float8_training(model, config=config)
        if self.policy is None:
            return model
        base = recipe_of(self.policy.recipe)
        if base is not None and why_not_recipe(base):
            backend = "simulate"
        return convert(model, self.policy, backend=backend)

    @property
    def recipes(self) -> list[Recipe]:
        if self.policy is None:
            return []
        sources = map(recipe_of, self.policy.recipes)
        return [recipe for recipe in sources if recipe is not None]

    @property
    def simulated(self) -> str:
        """Returns why the GPU has no kernel for a recipe, "" if it has kernels for all. See
        `Variant.simulated`."""
        return next(filter(None, map(why_not_recipe, self.recipes)), "")

    def estimated(
        self, products: Sequence[Product], model: nn.Module, device: Hardware
    ) -> Variant:
        """Returns the variant as the sizes of products give it."""
        rows = resolve(self.policy or Policy(None), model).items()
        recipes = {name or "(model)": row.recipe for name, row in rows}
        variant = estimate(products, recipes, device, self.name)
        if self.torchao:  # whose recipe the estimate does not know
            return replace(variant, layers={})
        if self.policy is None:
            return variant
        return replace(variant, policy=self.policy.to_dict())


class _Step(NamedTuple):
    """A model and a batch of fake tensors, whose step is compiled under recipes."""

    model: nn.Module
    batch: Batch
    loss: Loss | None
    options: Mapping[str, object] | None

    @property
    def values(self) -> list[Tensor]:
        """The parameters and buffers."""
        return [*self.model.parameters(), *self.model.buffers()]

    @property
    def nbytes(self) -> int:
        """Bytes of parameters, buffers and the batch."""
        return sum(x.nbytes for x in {*self.values, *tensors(self.batch)})

    def converted(self, converter: _Converter, backend: str = "auto") -> nn.Module:
        """A copy that shares parameters and buffers."""
        shared = {id(x): x for x in self.values}
        model = converter(deep_copy(self.model, shared), backend)
        if any(recipe.keeps_history for recipe in converter.recipes):
            self._calibrate(model)
        skip_look(model)
        return model

    def compiled(self, converter: _Converter) -> list[Graph]:
        model = self.converted(converter)

        def run(batch: Batch) -> object:
            output = call(model, batch)
            if self.loss is None:
                return output
            return loss_value(output, self.loss)

        return graphs(run, self.batch, options=self.options)

    def _calibrate(self, model: nn.Module) -> None:
        """Notes states of layers as set, and states of layers that read one tensor as shared, as
        `fp8.calibrate` or a step leaves them."""
        layers: dict[nn.Module, Any] = {
            self.model.get_submodule(name): module
            for name, module in model.named_modules()
            if hasattr(module, "fp8_measured")
        }
        inputs: dict[nn.Module, Tensor] = {}

        def note(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            if module in layers:
                inputs[module] = args[0]

        with register_module_forward_pre_hook(note), torch.no_grad():
            call(self.model, self.batch)
        scales: dict[int, Tensor] = {}
        for module, x in inputs.items():
            layer = layers[module]
            measured = vars(layer.fp8_measured)
            states = histories(layer, recurse=False)
            measured.update(dict.fromkeys(states, True))
            for state in states.values():
                state.fill_(1)
            if has_scales(layer):
                scale = scales.setdefault(id(x), layer.fp8_scale_input)
                if scale is not layer.fp8_scale_input:
                    measured["fp8_scale_input"] = scale


def _summed(
    variant: Variant, compiled: Sequence[Graph], found: Times, replays: bool
) -> Variant:
    """The variant with what its kernels say. replays: whether no kernel is launched alone."""
    kernels = [kernel for graph in compiled for kernel in graph.kernels]
    kinds = Counter(kernel.kind for kernel in kernels)
    other = (kernel for kernel in kernels if kernel.kind in (TRITON, OTHER))
    host = 0.0 if replays else found.host
    return replace(
        variant,
        kernels=len(kernels),
        fp8=kinds["fp8"],
        high=kinds["bf16"] + kinds["fp32"],
        flops=sum(kernel.flops for kernel in kernels),
        moved=sum(kernel.moved for kernel in other),
        saved=sum(graph.saved for graph in compiled),
        peak=found.peak,
        card=found.card,
        host=host,
        seconds=max(found.card, host),
    )


def _empty(model: nn.Module, batch: Batch, device: str) -> tuple[nn.Module, Batch]:
    """Copies whose tensors are new ones on a device."""

    def empty(x: Tensor) -> Tensor:
        new = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
        return new.requires_grad_(x.requires_grad)

    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        new = empty(tensor.detach())
        if isinstance(tensor, nn.Parameter):
            new = nn.Parameter(new, tensor.requires_grad)
        vars(new).update(vars(tensor))  # the tags of unit_scaling
        memo[id(tensor)] = new
    return deep_copy(model, memo), pytree.tree_map_only(Tensor, empty, batch)
