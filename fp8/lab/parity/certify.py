"""`certify`: whether a trainer computes, to the bit, what an inference engine computes with the
weights that it gets."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...adapters.transformers import is_pretrained
from ...casts.casting import cast_forward
from ...casts.scaled_tensor import dequantized
from ...checkpoints.check import check_layout
from ...checkpoints.load import load
from ...checkpoints.stacks import as_outputs
from ...checkpoints.weights import weights
from ...common.copies import deep_copy
from ...common.libraries import probe
from ...common.report import as_table, finite
from ...common.step import tensors, unwrapped
from ...common.validation import check_module
from ...layers.calibrate import calibrate
from ...layers.convert import convert, revert_layers
from ...layers.roles import with_role
from ...layers.select import layers_of
from ...layers.settings import converted
from ...recipes.cast import Cast
from ...recipes.history import history_of
from ...recipes.policy import LayerRule, Policy
from ...recipes.recipe import Recipe
from ...recipes.tensor_cores import EXACT
from ...version import __version__
from .devices import Devices
from .engines import Engine, engine_of
from .epilogue import set_epilogue
from .norms import norms_in, norms_of_engine
from .sides import (
    Given,
    Side,
    check_cache,
    checked_prompts,
    logits_of,
    measures,
    set_sums,
)

__all__ = ["Certificate", "certify"]

KEPT = ("embedding", "readout", "router")
"""The roles of layers that engines serve in high precision unless a checkpoint says otherwise."""

NOT_COVERED = (
    "the engine's kernels on a card: attention, when a bias is added, and which of its two scales "
    "a product is multiplied by first, where that depends on shapes",
    "where what experts return is rounded before it is weighted and added",
    "decoding step by step and sampling",
    "of several devices: experts, and kernels that add partial outputs and normalize at once",
)
"""What a certificate says nothing of."""


@dataclass(frozen=True, kw_only=True)
class _Compared:
    """What the logits of both sides give, of a `Certificate`."""

    equal: float
    kl: float
    ess: float
    changed: float
    ratio: float
    begins: str


@dataclass(frozen=True, kw_only=True)
class Certificate(_Compared):
    """The result of `certify`. It prints as a table.

    Attributes:
        model: the class of the model.
        dtype: of its parameters.
        served: of those that the engine has in high precision.
        engine, version, source: of the row in `ENGINES`.
        train: the name of the trainer's policy.
        sums: `fp8.Recipe.accumulate` of both.
        cache: the scaling of the engine's cache; "" for none in FP8.
        devices: the number of devices that share the engine's model.
        reduction: how their partial outputs are added.
        epilogue: the operand whose scale the engine multiplies by first.
        split: the names of the layers whose inputs devices split, of engine or trainer.
        cast: the names of the layers that the engine has in low precision.
        kept: the names of the linear layers that it has in high precision.
        norms: the RMS norms that have the engine's order there.
        gains: other modules with vectors alone, as norms of another kind: they are as the trainer
            has them.
        tokens: the number of tokens in the prompts.
        layout: the first tensor that is not as the engine wants it, by
            `fp8.checkpoints.check.check_layout`; "" if all are.
        weights: what differs between the weights that the engine has loaded and those that the
            trainer wrote; "" if they are equal to the bit.
        equal: the share of logits that are equal to the bit.
        kl, ess, changed: as in `fp8.lab.parity.parity.Parity`.
        ratio: the largest ratio of the probabilities of a token of the prompts, at least 1.
        begins: the first module whose output differs; "" for none.
        versions: library -> version.
    """

    model: str
    dtype: str
    served: str
    engine: str
    version: str
    source: str
    train: str
    sums: str
    cache: str
    devices: int
    reduction: str
    epilogue: str
    split: list[str]
    cast: list[str]
    kept: list[str]
    norms: list[str]
    gains: list[str]
    tokens: int
    layout: str
    weights: str
    versions: dict[str, str]

    @property
    def ok(self) -> bool:
        """Whether the layout is the engine's, and the weights and all logits equal to the bit."""
        return self.equal == 1 and not (self.layout or self.weights)

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values, None for those that are not finite, and "ok"."""
        return finite(asdict(self) | {"ok": self.ok, "not_covered": [*NOT_COVERED]})

    def rows(self) -> list[tuple[str, str]]:
        """What a reader sees: (what, value)."""
        rollout = f"{self.engine}: {self.version}"
        if self.cache:
            rollout += f", cache in FP8 by {self.cache}"
        if self.devices > 1:
            rollout += f", on {self.devices} devices"
        found = "equal to the bit" if self.equal == 1 else f"{self.equal:.2%} equal"
        sums = self.sums
        if self.epilogue != "input":
            sums += f", the engine's times the scale of the {self.epilogue} first"
        split = "none"
        if self.split:
            split = f"{len(self.split)}, partial outputs added by {self.reduction!r}"
        return [
            ("result", "pass" if self.ok else "fail"),
            ("model", self.model),
            ("trainer", f"{self.train}, {self.dtype}"),
            ("engine", f"{rollout}, {self.served}"),
            ("sums", sums),
            ("layout of the weights", self.layout or "as the engine wants it"),
            ("weights through the layout", self.weights or "equal to the bit"),
            ("logits", f"{found}, {self.tokens} tokens"),
            ("KL(rollout || train)", f"{self.kl:.6f} per token"),
            ("largest ratio of probabilities", f"{self.ratio:.6f}"),
            ("argmax changed", f"{self.changed:.2%}"),
            ("differs first in", self.begins or "nothing"),
            ("layers in low precision", str(len(self.cast))),
            ("linear layers in high precision", str(len(self.kept))),
            ("RMS norms in the engine's order", str(len(self.norms))),
            ("other norms and gains", f"{len(self.gains)}, as the trainer has them"),
            ("layers whose inputs devices split", split),
        ]

    def __str__(self) -> str:
        return as_table(self.rows())

    def page(self) -> str:
        """The certificate as one HTML page. Raises ImportError without jinja2."""
        from ..page import rendered

        return rendered(
            "parity/page.html", {}, certificate=self, not_covered=NOT_COVERED
        )


def certify(
    model: nn.Module,
    prompts: Tensor | Iterable[Tensor],
    *,
    engine: str | Engine = "vllm_row",
    train: Given | None = None,
    sums: str | None = EXACT,
    cache: str | None = None,
    devices: int = 1,
    train_devices: int = 1,
    split: Iterable[str] | None = None,
    dtype: torch.dtype | None = torch.bfloat16,
) -> Certificate:
    """Compares a trainer with an inference engine that has loaded its weights: a `Certificate`.

    The weights of the trainer are written in the engine's layout and read into a second model,
    which casts, normalizes and sums as the engine; both compute the logits of the prompts. It
    passes if all logits are equal to the bit.

    Every pass runs in evaluation mode without gradients; ``model`` is not changed. NaN is equal to
    no number.

    Args:
        model: as for `fp8.parity`. Its RMS norms are those of the trainer: `norms_of_engine` gives
            them the engine's order.
        prompts: as for `fp8.parity`.
        engine: a name in `fp8.lab.parity.engines.ENGINES`, or an `Engine`.
        train: the policy of the trainer, as for `fp8.parity`. None: a converted model as it is;
            otherwise the recipe of the engine for all layers that its layout stores, without
            readout and routers.
        sums: `fp8.Recipe.accumulate` of recipes that state none, on both sides. "exact" ones are
            equal for every order and size of the batch. None: those of torch.
        cache, devices, train_devices, split: as for `fp8.parity`.
        dtype: of the engine's parameters in high precision, and so of what it computes; None: that
            of the model. A trainer in float32 differs from an engine in bfloat16.

    Raises:
        TypeError, ValueError: as `fp8.parity` and `fp8.weights`; for an unknown engine.
    """
    check_module("certify", model)
    engine = engine_of(engine)
    model, ids = unwrapped(model), checked_prompts(prompts)
    check_cache(model, cache)
    if train is None and not converted(model):
        train = _twin(model, engine, ids[0])
    trainer = Side.of(train, sums).shared(model, train_devices, split, engine)
    ours = trainer.of_model(model, ids[0])
    theirs = _served(model, ours, engine, sums, dtype)
    shared = Devices.of(model, devices, split, engine.reduction)
    shared.share(theirs.model)
    found = _compared(ours, theirs.model, ids, cache)
    norms, gains = norms_in(theirs.model)
    return Certificate(
        model=type(model).__name__,
        dtype=_dtypes(model),
        served=_dtypes(theirs.model),
        engine=engine.name,
        version=engine.version,
        source=engine.source,
        train=trainer.name,
        sums=sums or "torch",
        cache=cache or "",
        devices=devices,
        reduction=shared.reduction,
        epilogue=engine.epilogue,
        split=[*(shared.layers or trainer.devices.layers)],
        cast=theirs.cast,
        kept=_kept(model, theirs.cast),
        norms=norms,
        gains=gains,
        tokens=sum(prompt.numel() for prompt in ids),
        layout=theirs.layout,
        weights=theirs.differs,
        versions=_versions(model),
        **vars(found),
    )


def _dtypes(model: nn.Module) -> str:
    found = {str(p.dtype).removeprefix("torch.") for p in model.parameters()}
    return ", ".join(sorted(found))


def _versions(model: nn.Module) -> dict[str, str]:
    versions = {"fp8": __version__, "torch": torch.__version__}
    if is_pretrained(model):
        versions["transformers"] = probe("transformers").version
    return versions | {"python": platform.python_version()}


def _kept(model: nn.Module, cast: list[str]) -> list[str]:
    linear = [name for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    return [name for name in linear if name not in cast]


def _twin(model: nn.Module, engine: Engine, ids: Tensor) -> Policy:
    """The engine's recipe for all layers that its layout stores."""
    layers = {name: module for name, module, why in layers_of(model) if why is None}
    kept: list[str] = []
    for role in KEPT:
        with suppress(ValueError):  # a model without such layers
            kept += with_role(role, model, layers)
    policy = Policy(
        engine.recipe, rules=[*map(LayerRule, kept)], name=engine.recipe.name
    )
    report = weights(Side.of(policy, None).of_model(model, ids)).report
    unread = [LayerRule(row.path) for row in report if row.left_alone]
    return replace(policy, rules=(*policy.rules, *unread))


class _Served(NamedTuple):
    """The model of the engine, its layers in low precision, what is wrong with the layout of the
    weights that were written, and how those that were loaded differ from them; "" if they do
    not."""

    model: nn.Module
    cast: list[str]
    layout: str
    differs: str


def _served(
    model: nn.Module,
    ours: nn.Module,
    engine: Engine,
    sums: str | None,
    dtype: torch.dtype | None,
) -> _Served:
    """The engine with the weights of a trainer."""
    stream = weights(ours)
    sent = {name: tensor.detach().clone() for name, tensor in stream}
    theirs = revert_layers(deep_copy(model))
    for parameter in theirs.parameters():
        # Not of buffers: tables of positions stay in float32, in engines too.
        if dtype is not None and parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    load(theirs, sent, config=stream.config)
    cast = [row.path for row in stream.report if not row.left_alone]
    # Which layers the engine casts is what the file says, not what the trainer does.
    rules = []
    for name in cast:
        layer: Any = ours.get_submodule(name)
        written = _written(name, layer.fp8_recipe, engine)
        rules.append(LayerRule(name, replace(engine.recipe, weight=written)))
    convert(theirs, Policy(None, rules=rules, name=engine.name))
    for name in cast:
        # A static scale of inputs is part of the file; the engine does not measure.
        if engine.recipe.input is not None and engine.recipe.input.scaling == "static":
            exponent = _input_exponent(name, sent, engine)
            calibrate(theirs.get_submodule(name), scales={"input": exponent})
    set_sums(theirs, sums)
    set_epilogue(theirs, engine.epilogue)
    norms_of_engine(theirs, engine)
    layout = check_layout(sent, engine.engine, config=stream.config).why
    return _Served(theirs, cast, layout, _difference(ours, theirs, cast))


def _input_exponent(name: str, sent: dict[str, Tensor], engine: Engine) -> int:
    """Of the static scale of a layer's inputs, which is a power of two."""
    scale = sent.get(f"{name}.input_scale")
    if scale is None:
        raise ValueError(
            f"{engine.name} reads a static scale of the inputs of {name}, and the trainer writes "
            "none: convert it to 'static'"
        )
    return int(scale.log2().item())


def _written(name: str, recipe: Recipe, engine: Engine) -> Cast:
    """The cast by which the engine reads the weight of a layer of the trainer, whose values it does
    not change. Raises ValueError for scales that the engine does not read."""
    weight, read = recipe.weight, engine.recipe.weight
    assert weight is not None
    assert read is not None
    if weight.scaling in ("static", "delayed", "unit"):
        # Their scales are powers of two, of which each that avoids overflow keeps the values.
        weight = Cast(format=weight.format, scaling="tensor")
    if weight.scaling != read.scaling:
        raise ValueError(
            f"{engine.name} reads weights with scales by {read.scaling}, and recipe "
            f"{recipe.name!r} of {name} writes them by {weight.scaling}"
        )
    return weight


@torch.no_grad()
def _difference(ours: nn.Module, theirs: nn.Module, cast: list[str]) -> str:
    """The first tensor that the engine has otherwise than the trainer computes with it; "" for
    none."""
    loaded = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        mine, other = parameter.detach(), loaded[name].detach()
        path, _, last = name.rpartition(".")
        if path in cast and (last == "weight" or parameter.dim() == 3):
            layer: Any = ours.get_submodule(path)
            state, cast_of_it = history_of(layer, "weight"), layer.fp8_recipe.weight
            rounded = partial(cast_forward, cast=cast_of_it, history=state)
            if parameter.dim() == 3:
                each = [rounded(x) for x in as_outputs(layer, mine.float())]
                mine = as_outputs(layer, torch.stack(each))
            else:
                mine = rounded(mine.float())
            other = dequantized(other, torch.float32)
        else:
            mine = mine.to(other.dtype)
        if not torch.equal(_bits(mine), _bits(other)):
            return f"{name}: {float((mine != other).float().mean()):.2%} differ"
    return ""


def _bits(x: Tensor) -> Tensor:
    return x.detach().contiguous().reshape(-1).view(torch.uint8)


def _compared(
    ours: nn.Module, theirs: nn.Module, ids: list[Tensor], cache: str | None
) -> _Compared:
    traces: list[dict[str, list[bytes]]] = []
    logits = []
    # A trainer computes whole sequences: the cache is the engine's alone.
    for model, scaling in ((ours, None), (theirs, cache)):
        with ExitStack() as stack:
            traces.append(_traced(model, stack))
            logits.append(logits_of(model, ids, scaling))
    figures = measures(logits[0], logits[1], ids)
    # NaN counts as a difference: it is not equal to itself.
    pairs = [(a == b).flatten() for a, b in zip(*logits, strict=True)]
    sizes = [abs(value) for row in figures.differences for value in row]
    return _Compared(
        equal=float(torch.cat(pairs).double().mean()),
        kl=figures.kl,
        ess=figures.ess,
        changed=figures.changed,
        ratio=float(torch.tensor(max(sizes)).double().exp()),
        begins=_first(*traces),
    )


def _traced(model: nn.Module, stack: ExitStack) -> dict[str, list[bytes]]:
    """Name -> a digest of what each call of a module has returned, in the order in which modules
    first return, while ``stack`` is open."""
    digests: dict[str, list[bytes]] = {}

    def record(name: str, _: nn.Module, args: object, output: object) -> None:
        # Digests, as the outputs of all modules would not fit in memory.
        total = blake2b(digest_size=16)
        for tensor in tensors(output):
            total.update(_bits(tensor).cpu().numpy().tobytes())
        digests.setdefault(name, []).append(total.digest())

    for name, module in model.named_modules():
        if name:
            handle = module.register_forward_hook(partial(record, name))
            stack.callback(handle.remove)
    return digests


def _first(ours: dict[str, list[bytes]], theirs: dict[str, list[bytes]]) -> str:
    return next((name for name in ours if ours[name] != theirs.get(name)), "")
