"""Checks at the first call of a model: its weights, and the first gradient of its output.

Two mistakes raise no error: weights overwritten by the model's own init, and a loss whose gradient
is divided by the batch size. Compiled calls are not checked.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from fp8.common.compiler import eager_only
from fp8.common.step import in_own_thread
from fp8.torch_internals.pipelining import in_shape_inference
from fp8.torch_internals.running_calls import python_frames
from fp8.warnings import ScaleWarning, warn_once

LOW_GRADIENT = 2.0**-6
"""A gradient at the output with an RMS below this is reported.

It should be 1. The smallest normal number of E5M2 is 2**-14, and the entries of a cross entropy
gradient are smaller than its RMS by the root of the number of classes: 2**-6 leaves a factor of
2**8.
"""

RANGE = (1 / 4, 4.0)
"""The RMS of a weight that counts as unit-scaled, as in `unit_scaling.verify`."""

_FEW = 16
"""Smaller weights may be outside `RANGE` by chance; 16 normal values are in 1e-7 of cases."""


def check_weights_at_first_call(module: nn.Module) -> None:
    """Checks the weights of the model that contains ``module`` at its first call."""
    module.register_forward_pre_hook(_at_first_call)


def skip_weight_check(module: nn.Module) -> bool:
    """Removes the check, as weights of a checkpoint may have any RMS; whether there was one."""
    hooks = module._forward_pre_hooks
    keys = [key for key, hook in hooks.items() if hook is _at_first_call]
    for key in keys:
        del hooks[key]
    return bool(keys)


def skip_checks(model: nn.Module) -> None:
    """Removes all checks from a copy that is measured anyway."""
    for part in model.modules():
        skip_weight_check(part)
        owner: Any = part
        if hasattr(owner, "gradient_seen"):
            owner.gradient_seen = True


@eager_only()
def _at_first_call(module: nn.Module, args: Any) -> None:
    model = _outermost() or module
    unchecked = [
        (path, part) for path, part in model.named_modules() if skip_weight_check(part)
    ]
    # In a thread of its own: no mode is to record what is read.
    sizes = in_own_thread(lambda: [_rms_outside(part) for _, part in unchecked])
    wrong = [index for index, rms in enumerate(sizes) if rms]
    if not wrong:
        return
    path, part = unchecked[wrong[0]]
    rms = sizes[wrong[0]]
    layer = f"{path or 'the model'} ({type(part).__name__})"
    others = f", and of {len(wrong) - 1} more layers not 1" if len(wrong) > 1 else ""
    warn_once(
        ScaleWarning,
        f"the RMS of the weight of {layer} is {rms:.3g} instead of 1{others}: something has "
        "overwritten it since the layer was made, as model.apply(_init_weights) does. Unit-scaled "
        "layers draw their own weights: leave them out of the init, or call reset_parameters() of "
        "each after it",
        about=model,
        key="weights",
    )


def _outermost() -> nn.Module | None:
    """The outermost module that is being called."""
    code = nn.Module.__call__.__code__
    called = [
        frame.f_locals.get("self") for frame in python_frames() if frame.f_code is code
    ]
    if called:
        return called[-1]
    return None


def _rms_outside(module: nn.Module) -> float | None:
    """The RMS of the module's first weight that is far from 1."""
    for p in module.parameters(recurse=False):
        if is_weight(p) and p.numel() >= _FEW:
            rms = known_rms(p)
            if rms is not None and not is_near_one(rms):
                return rms
    return None


def is_weight(parameter: Tensor) -> bool:
    """Whether a parameter is tagged as one whose entries have RMS 1 in a unit-scaled layer."""
    kind = getattr(parameter, "mup_type", "")
    return kind in ("weight", "output") and parameter.dim() > 1


def is_near_one(rms: float) -> bool:
    """Whether an RMS is that of a unit-scaled weight."""
    return RANGE[0] <= rms <= RANGE[1]


def is_readable(tensor: Tensor) -> bool:
    """Whether a tensor is dense and has values, all of them in this process."""
    is_plain = type(tensor.data) is Tensor and not tensor.is_meta
    return is_plain and tensor.layout is torch.strided and tensor.numel() > 0


def known_rms(tensor: Tensor) -> float | None:
    """The RMS; None if it is zero or unknown (meta tensors, sharded tensors, inside vmap)."""
    if not is_readable(tensor):
        return None
    with suppress(RuntimeError):  # no values inside torch.func transforms
        norm: float = in_own_thread(_norm, tensor)
        return norm * tensor.numel() ** -0.5 or None
    return None


def _norm(tensor: Tensor) -> float:
    return torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64).item()


@eager_only()
def check_gradient(owner: Any, output: Tensor) -> None:
    """Checks the first gradient of ``output``, the output of a unit-scaled model.

    owner: its attribute ``gradient_seen`` says whether this was done; it is set here.
    """
    recorded = output.requires_grad and output.dim() > 0 and torch.is_grad_enabled()
    if owner.gradient_seen or not recorded or in_shape_inference():
        return

    @eager_only()
    def check(grad: Tensor) -> None:
        rms = None if owner.gradient_seen else known_rms(grad)
        if rms is not None:
            owner.gradient_seen = True
            if rms < LOW_GRADIENT:
                warn_once(ScaleWarning, _LOW.format(rms), about=owner, key="gradient")

    output.register_hook(check)


_LOW = (
    "the first gradient at the output of a unit-scaled model has RMS {:.2g} instead of 1: the loss "
    "is outside of the model and divides by the size of the batch, as "
    "torch.nn.functional.cross_entropy does, and FP8 formats round much of such a gradient to "
    "zero. Use the loss of unit_scaling.functional (U.cross_entropy); or keep the loss, with "
    "recipe 'tensor', which has a scale for each tensor"
)
