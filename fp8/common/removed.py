"""Names, arguments and choices that this library does not have: those that it once had, and those
that users of other libraries expect. Each error says what to use instead."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_BY_LAYER = "a scale belongs to a layer: fp8.convert(model, 'delayed') gives each layer its own"
_BY_POLICY = (
    'give a policy, which names the recipe of the other layers: fp8.Policy.umup("unit", '
    'others="bf16")'
)
_REDUCE = "fp8.reduce_amax(model, group) makes the scales of processes equal"
_TE = "call transformer_engine.pytorch.autocast, which it calls"
_ATTENTION = 'leave it out; attention is one product, cast as "input" and "grad"'
_WHERE = (
    "it is a function (name, module) -> bool; fp8.convert takes the policy fp8.Policy.{}(recipe) "
    "in the place of a recipe"
)
_CAST_FIELDS = {
    "mean": "leave it out; the mean of an operand is cast with the rest",
    "random_bits": "leave it out; stochastic rounding in casts draws 31 random bits",
    "residual": "leave it out; rounding errors are not cast again",
}
_RECIPE_FIELDS = {"attention_scores": _ATTENTION, "attention_values": _ATTENTION}

INSTEAD: dict[str, dict[str, str]] = {
    "fp8": {
        "AmaxHistory": _BY_LAYER,
        "CheckpointWarning": "it is fp8.warnings.CheckpointWarning",
        "ConvertWarning": "it is fp8.warnings.ConvertWarning",
        "Level": "it is in fp8.levels.initialize",
        "NoEffectWarning": "it is fp8.warnings.ConvertWarning",
        "OptimizerWarning": "it is fp8.warnings.OptimizerWarning",
        "Preflight": "it is in fp8.lab.preflight.preflight",
        "PreflightError": "it is in fp8.lab.preflight.preflight",
        "RecipeWarning": "it is fp8.warnings.RecipeWarning",
        "ScaleWarning": "it is fp8.warnings.ScaleWarning",
        "dump": "it is in fp8.lab.stats",
        "export_weights": (
            "model.state_dict() loads into the plain model; at O3 "
            "fp8.optim.AdamW(plain.parameters()).load_state_dict(optimizer.state_dict()) then "
            "writes the masters to its weights. fp8.export writes files for serving"
        ),
        "get_format": "use FORMATS[name]",
        "get_recipe": "use RECIPES[name]",
        "is_fast_norm": "apply_low_precision_layernorm changes the norms of a model",
        "low_precision_norms": (
            "use apply_low_precision_layernorm, for norms of every type with where=lambda name, "
            "norm: True"
        ),
        "norm_report": "use report, which lists norms too",
        "quantize_backward": "it is in fp8.formats.quantize",
        "quantize_forward": "it is in fp8.formats.quantize",
        "revert_norms": "use revert, which reverts norms too",
        "set_fast_norm": "use apply_low_precision_layernorm after the model is made",
        "state": (
            "fp8.optim.state_bytes(optimizer) counts the bytes of weights, gradients and states, "
            "and p.nbytes those of one parameter"
        ),
    },
    "fp8.adapters": {
        "bitsandbytes": (
            "call an optimizer of bitsandbytes.optim; uu.optim.scaled_parameters makes its groups"
        ),
    },
    "fp8.Cast": _CAST_FIELDS,
    "fp8.Recipe": _RECIPE_FIELDS,
    "fp8.adapters.lightning.FP8FabricPrecision": {"rest": _BY_POLICY},
    "fp8.adapters.lightning.FP8Precision": {"rest": _BY_POLICY},
    "fp8.adapters.torchtitan.FP8Converter": {"rest": _BY_POLICY},
    "fp8.adapters.transformer_engine.autocast": {
        "amax_reduction_group": _TE,
        "calibrating": _TE,
        "fp8_group": _TE,
        "fp8_recipe": "it is recipe=, a name, a Recipe or a recipe of TransformerEngine's",
    },
    "fp8.adapters.transformers": {
        "register_attention": (
            'use set_attn_implementation("sdpa"), which casts query, key, value and the gradient '
            'of the output, or "eager", which casts the probabilities too'
        ),
    },
    "fp8.autocast": {
        "amax_reduction_group": _REDUCE,
        "calibrating": "fp8.calibrate(model, batch) sets the scales of a converted model",
        "fp8_group": _REDUCE,
        "fp8_recipe": (
            "it is recipe=, a name in fp8.RECIPES; docs/migration.md has the names for "
            "TransformerEngine's recipes"
        ),
        "history": _BY_LAYER,
    },
    "fp8.checkpoints": {
        "files": (
            "torch.save to a temporary file and os.replace (docs/distributed.md#checkpoints), or "
            "torch.distributed.checkpoint"
        ),
    },
    "fp8.convert": {"rest": _BY_POLICY},
    "fp8.distributed": {
        "all_to_all": (
            "send tokens by torch.distributed.all_to_all_single in high precision, or by an "
            "engine that dispatches them in FP8 (torchao.prototype.moe_training, Megatron-LM)"
        ),
    },
    "fp8.initialize": {
        "use_te": (
            "recipe=None leaves the products of TransformerEngine's layers as they are; "
            "fp8.adapters.msamp.initialize takes use_te"
        ),
    },
    "fp8.optim": {
        "Muon": "use torch.optim.Muon for hidden matrices and fp8.optim.AdamW for all others",
        "muon_groups": (
            "give torch.optim.Muon the weights of linear layers inside of the blocks, and all "
            "other parameters to fp8.optim.AdamW"
        ),
    },
    "fp8.optim.AdamW": {"error_feedback": "use stochastic_weights=True, or master_weights"},
    "fp8.lab.hardware.estimate": {
        "optimizer": "the memory is that of Adam",
        "parameters": "the memory is that of the weights of the products",
    },
    "first_moment": {"int8_block": "use 'e4m3_block', which takes as many bytes"},
    "key of a Cast": _CAST_FIELDS,
    "key of a Recipe": _RECIPE_FIELDS,
    "recipe": {
        "coat": "use Recipe.saved_activations of a recipe of your own",
        "fog": 'use "delayed", or casts with history=1024',
        "moss": 'use "block"',
        "mus": 'use "unit" with fp8.Policy.hidden("unit")',
        "smooth_swiglu": 'use "delayed", whose casts are the same',
        "ufp4": 'use "nvfp4", or casts of format "e1m2" with scaling "block"',
    },
    "rule": {"two_level": 'use scaling "block" with its rule "up"'},
    "unit_scaling": {
        "recalibrate": (
            "gradients are the true ones; fp8.calibrate(model, batch) sets the scales of their "
            "casts"
        ),
    },
    "unit_scaling.transforms.unit_scale": {
        "context_length": (
            "attention has no factor: its output is cast at the scale that the first call measures"
        ),
    },
    "where": {name: _WHERE.format(name) for name in ("hidden", "umup")},
}
"""Owner -> name -> what to use instead. The owner is a module ("fp8.optim") for a name in it, a
function or class ("fp8.autocast") for an argument, and the argument ("recipe") for a choice."""


def check_not_removed(owner: str, name: object, error: type[Exception]) -> None:
    """Raises ``error`` if ``name`` is listed in INSTEAD under ``owner``."""
    instead = INSTEAD.get(owner, {}).get(name) if isinstance(name, str) else None
    if instead is not None:
        raise error(f"{owner} has no {name!r}: {instead}")


def attributes_of(module: str, late: Mapping[str, str] | None = None) -> Callable[[str], Any]:
    """The ``__getattr__`` of a module: a removed name, listed in INSTEAD, raises what to use
    instead.

    late: name -> the module that is imported when the name is first read: its attribute of that
    name or, for a module of that name, itself.
    """
    late = late or {}

    def __getattr__(name: str) -> Any:
        if name in late:
            source = import_module(late[name])
            value = source if late[name] == f"{module}.{name}" else getattr(source, name)
            setattr(sys.modules[module], name, value)
            return value
        check_not_removed(module, name, AttributeError)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return __getattr__


def refuses_removed(owner: str) -> Callable[[F], F]:
    """Decorator of a function or of an ``__init__``: a call with an argument that INSTEAD lists
    under ``owner`` raises a TypeError that says what to use instead."""

    def decorated(function: F) -> F:
        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            for name in kwargs.keys() & INSTEAD.get(owner, {}).keys():
                check_not_removed(owner, name, TypeError)
            return function(*args, **kwargs)

        return checked  # type: ignore[return-value]

    return decorated
