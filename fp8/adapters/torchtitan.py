"""torchtitan: a converter for the configurations of its models.

    spec = model_registry("8B", converters=[FP8Converter("tensor")])

torchtitan builds a model from a tree of configurations, on the meta device. The converter changes
the root of the tree alone: its ``build`` returns the model converted by `fp8.convert`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ..common.libraries import need, transforms
from ..common.validation import check_name
from ..products.active import BACKENDS
from ..recipes.policy import Policy, as_policy
from ..recipes.recipe import AUTO, Recipe
from ..selection.layers import Where
from ..surgery.convert import convert, report

__all__ = ["FP8Converter"]

Transform = Callable[[nn.Module], nn.Module]


def FP8Converter(
    recipe: str | Path | Recipe | Policy = AUTO,
    *,
    backend: str = "auto",
    where: Where | None = None,
    transform: str | Transform | None = None,
) -> Any:
    """A converter for ``model_registry(flavor, converters=[...])``: the model trains in FP8.

    torchtitan logs `fp8.report` of the model when it builds it.

    Args:
        recipe: as in `fp8.convert`; or the path of a policy, a JSON file of `Policy.to_json`. A
            switch of a policy needs `fp8.advance`, which torchtitan does not call.
        backend, where: as in `fp8.convert`, without the backends of other libraries.
        transform: a function of a model that returns one which trains with the same optimizer, or
            its name as an entry point of the group "fp8.transforms": "unit_scale" gives the model
            unit scaling. A transform may have to see a call: each process initializes the whole
            model on its device and runs a pass on random tokens in the shape of the training's,
            with the mean cross-entropy, before it is sharded.

    Returns:
        The configuration of the converter. Under "auto" with a transform, the recipe is the
        ``recipe`` of the transform if it has one.

    Raises:
        ValueError: for an unknown name, a policy with a switch, and a transform that needs an
            optimizer of its own; and, when torchtitan builds the
            model, for settings of its Trainer that a transform does not allow: chunked losses,
            activation checkpointing, an ``spmd_backend`` other than "partial_dtensor".
        TypeError: for a transform that is no function.
        ImportError: if torchtitan is not installed.
    """
    check_name("backend", backend, BACKENDS)
    if isinstance(transform, str):
        registered = transforms()
        check_name("transform", transform, registered)
        transform = registered[transform]
    if transform is not None and not callable(transform):
        raise TypeError(f"transform must be a name or a function, got {type(transform).__name__}")
    if hasattr(transform, "optimizer"):
        raise ValueError(
            "the transform needs an optimizer of its own, and torchtitan builds the optimizer"
        )
    if recipe == AUTO:
        recipe = getattr(transform, "recipe", AUTO)
    if isinstance(recipe, Path) or (isinstance(recipe, str) and recipe.endswith(".json")):
        recipe = Policy.from_json(Path(recipe))
    if as_policy(recipe).switch:
        raise ValueError("torchtitan does not call fp8.advance: give a policy without a switch")
    how = {"backend": backend, "where": where}
    base = _module("protocols.model").ModelConfigConverter
    return _kind(base).Config(recipe=recipe, how=how, transform=transform)


@functools.cache
def _kind(base: Any) -> Any:
    class Converter(base):
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(base.Config):
            recipe: Any
            how: dict[str, Any]
            transform: Any = None

        def __init__(self, config: Any) -> None:
            self.config = config

        def convert(self, model_config: Any) -> Any:
            """The configuration of the model, of a class that also converts what it builds."""
            names = [f.name for f in dataclasses.fields(model_config) if f.init]
            values = {name: getattr(model_config, name) for name in names}
            return _converting(type(model_config), self.config)(**values)

    return Converter


def _converting(base: Any, asked: Any) -> Any:
    """A subclass of ``base``, the configuration of a model, that converts the model it builds."""

    class Converting(base):
        fp8_trainer: Any = None

        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            base.update_from_config(self, config=config, **kwargs)
            self.fp8_trainer = config

        def build(self, **kwargs: Any) -> Any:
            model = base.build(self, **kwargs)
            if asked.transform is not None:
                model = _transformed(model, asked.transform, self)
            model = convert(model, asked.recipe, **asked.how)
            _module("tools.logging").logger.info("%s", report(model))
            return model

    Converting.__name__, Converting.__qualname__ = base.__name__, base.__qualname__
    return Converting


def _transformed(model: Any, transform: Transform, config: Any) -> Any:
    """The transformed model, on the meta device, after a pass in the shape of the training's."""
    _check_whole(config.fp8_trainer)
    training = config.fp8_trainer.training
    shape = (training.local_batch_size, training.seq_len)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    others = [] if device.type == "cpu" else [torch.accelerator.current_device_index()]
    kind = "cuda" if device.type == "cpu" else device.type  # that of ``others``
    with torch.random.fork_rng(others, device_type=kind), device:
        model.to_empty(device=device)
        with torch.no_grad():
            model.init_weights(buffer_device=None)
        model = transform(model)
        arguments = {"positions": torch.arange(shape[1]).expand(shape).contiguous()}
        attention = _module("models.common.attention")
        masked = (attention.FlexAttention.Config, attention.VarlenAttention.Config)
        if isinstance(config.first_attention.inner_attention, masked):
            arguments["attention_masks"] = model.get_attention_masks(**arguments)
        tokens, targets = torch.randint(config.vocab_size, (2, *shape))
        loss = F.cross_entropy(model(tokens, **arguments).flatten(0, 1).float(), targets.flatten())
        loss.backward()  # of the size of the training's, which the next call adopts
        model(tokens, **arguments)
    model.zero_grad()
    return model.to("meta")


def _check_whole(trainer: Any) -> None:
    """Raises ValueError for settings under which the model does not run as the transform saw it."""
    if trainer is None:
        raise ValueError(
            "a transform needs the shape of the batches: call update_from_config of the model's "
            "configuration, as torchtitan's Trainer does, before build"
        )
    chunked = isinstance(trainer.loss, _module("components.loss").ChunkedLossWrapper.Config)
    backend = trainer.parallelism.spmd_backend
    why = "loss=ChunkedLossWrapper calls lm_head outside of the model" if chunked else ""
    if backend != "partial_dtensor":
        why = f"parallelism.spmd_backend={backend!r} replaces forwards"
    if trainer.activation_checkpoint is not None:
        why = "activation_checkpoint wraps the blocks"
    if why:
        raise ValueError(
            f"{why} after a transform has seen the model: with a transform, train with another "
            "loss, spmd_backend='partial_dtensor' and activation_checkpoint=None"
        )


def _module(name: str) -> Any:
    need("torchtitan")
    return importlib.import_module(f"torchtitan.{name}")
