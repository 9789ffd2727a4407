"""Runs the norms of a model in low precision: Composer's `apply_low_precision_layernorm`, and what
`fp8.report` and `fp8.revert` do for norms.

On CUDA devices `torch.autocast` runs norms in float32, which moves 20 bytes per element instead of
4. These norms run in its 16-bit dtype, with autocast disabled inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..casts.rotation import without_autocast
from ..common.mixin import Args, Forward, Mixin, add_mixin, bare_class, remove_mixin
from ..common.report import CHANGES, LEFT_ALONE, Change, Row
from ..common.validation import check_module, check_name
from ..formats.format import dtype_name
from ..frame import FRAMES, close_frame, open_frame
from ..layers.select import Where, checked_where
from ..torch_internals.hidden_functions import called
from ..warnings import ConvertWarning, show, warn_once
from .layer_norm2d import LayerNorm2d, layer_norm2d

M = TypeVar("M", bound=nn.Module)

NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, LayerNorm2d)
"""The supported norms, including subclasses that keep their forward."""

_ARGUMENTS: dict[Callable[..., Tensor], list[str]] = {
    F.layer_norm: "input normalized_shape weight bias eps".split(),
    **dict.fromkeys(
        (F.rms_norm, torch.rms_norm),  # torch.compile passes the second for both
        "input normalized_shape weight eps".split(),
    ),
    F.group_norm: "input num_groups weight bias eps".split(),
    layer_norm2d: "input weight bias eps".split(),
}
"""The function that a norm's forward calls -> its arguments."""

PRECISIONS: dict[str, torch.dtype | None] = {
    **dict.fromkeys(("amp", "amp_fp16"), torch.float16),
    "amp_bf16": torch.bfloat16,
    **dict.fromkeys(("amp_fp8", "fp32", "fp16", "bf16")),
}
"""Composer's name of a precision -> the dtype of norms. None: no effect, as the norms already run
in the dtype of their input."""


class _LowPrecision(Mixin):
    """A norm in ``norm_dtype`` (None: the dtype of the enclosing autocast)."""

    norm_dtype: torch.dtype | None

    def around(self, forward: Forward, args: Args, kwargs: dict[str, Tensor]) -> Tensor:
        x: Tensor = args[0] if args else kwargs["input"]
        autocast = not x.is_meta and torch.is_autocast_enabled(x.device.type)
        if x.dtype == torch.float64 or not (autocast or self.norm_dtype):
            return forward(*args, **kwargs)
        dtype = self.norm_dtype or torch.get_autocast_dtype(x.device.type)
        mode = _Beneath(dtype, dtype if autocast else x.dtype)
        mode.__enter__()
        try:
            return forward(*args, **kwargs)
        finally:
            mode.__exit__(None, None, None)

    def extra_repr(self) -> str:
        text = super().extra_repr()  # type: ignore[misc]
        return f"{text}, low_precision={_how(self)!r}"


class _Beneath(TorchFunctionMode):
    """Computes the norm's one call in low precision, after the early modes have seen it as
    a call of torch. dtype: the dtype of the computation. output: the dtype of the result."""

    def __init__(self, dtype: torch.dtype, output: torch.dtype) -> None:
        super().__init__()
        self._dtype, self._output = dtype, output
        self._above = FRAMES.items[-1].early_modes

    def __enter__(self) -> _Beneath:
        open_frame(self, early_modes=(self, *self._above))
        for mode in (self, *self._above):
            TorchFunctionMode.__enter__(mode)
        return self

    def __exit__(self, *error: object) -> None:
        for mode in (*reversed(self._above), self):
            TorchFunctionMode.__exit__(mode, *error)
        close_frame(self)

    def __torch_function__(
        self,
        function: Callable[..., Tensor],
        types: object,
        args: Args = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        if function not in _ARGUMENTS:
            return called(function, args, kwargs or {})
        named = dict(zip(_ARGUMENTS[function], args, strict=False)) | (kwargs or {})
        return _computed(function, self._dtype, **named).to(self._output)


def _computed(
    function: Callable[..., Tensor], dtype: torch.dtype, input: Tensor, **others: Any
) -> Tensor:
    """A norm of operands that are rounded to ``dtype``, with statistics in float32."""
    x = input.to(dtype)
    for name in ("weight", "bias"):
        if others.get(name) is not None:
            others[name] = others[name].to(dtype)
    if "bias" not in _ARGUMENTS[function]:
        # torch takes the machine epsilon of the dtype of the input.
        if others.get("eps") is None:
            others["eps"] = torch.finfo(torch.float32).eps
    # torch's kernels on a CPU save the statistics for the backward pass in the dtype of the
    # parameters; CUDA kernels save float32, and need parameters in the dtype of the input.
    elif x.device.type == "cpu":
        shape = others.get("normalized_shape", x.shape[1:2])
        for name, make in (("weight", x.new_ones), ("bias", x.new_zeros)):
            if others.get(name) is None:
                others[name] = make(shape)
            others[name] = others[name].float()
    with without_autocast(x):
        return function(x, **others)


def apply_low_precision_layernorm(
    model: M,
    precision: str | None = None,
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    *,
    where: Where | None = None,
) -> M:
    """Makes the norms of ``model`` compute in 16 bits, in place: Composer's function of this name.

    Each norm keeps its type, parameters (shared or frozen as they were) and their dtype, eps, hooks
    and name, so optimizers and checkpoints stay valid. `fp8.report` lists every norm, `fp8.revert`
    undoes the change. A model changed before gets the new precision. float64 inputs stay in
    float64.

    Args:
        model: changed in place.
        precision: a name in `PRECISIONS`, in any case, or Composer's enum. None: the dtype of the
            enclosing `torch.autocast` of the input's device; without one no effect. A named dtype
            always applies. Outside of autocast, where nothing casts for the next layer, the result
            is converted back to the dtype of the input. A precision without effect changes nothing.
        optimizers: ignored; the parameters do not change.
        where: (name, norm) -> whether to change it, called for norms of all types in `NORMS`:
            layer norms, RMS norms, group norms. None: layer norms, as in Composer.

    Returns:
        ``model``.

    Raises:
        TypeError: if ``model`` is not a module or ``where`` not a function.
        ValueError: for an unknown precision.

    Warns:
        ConvertWarning: if the precision has no effect or no norm was chosen.

    >>> import torch, fp8
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    >>> model = fp8.apply_low_precision_layernorm(model)
    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     print(model(torch.randn(2, 4)).dtype)
    torch.bfloat16
    """
    del optimizers
    check_module("apply_low_precision_layernorm", model)
    chosen = checked_where(where) or (lambda _, m: isinstance(m, nn.LayerNorm))
    name: Any = getattr(precision, "value", precision)
    if isinstance(name, str):
        name = name.lower()
    if name is not None:
        check_name("precision", name, PRECISIONS)
    dtype = PRECISIONS.get(name)
    if name is not None and dtype is None:
        why = f"precision {precision!r}: only amp_fp16 and amp_bf16 have an effect on norms"
        warn_once(ConvertWarning, why, model, "norms")
        return model
    norms = [m for name, m in _norms(model) if _is_supported(m) and chosen(name, m)]
    for module in norms:
        add_mixin(module, _LowPrecision, inside=True)
        module.norm_dtype = dtype  # type: ignore[assignment]
    if not norms:
        show(ConvertWarning, "the model has no such norm to change")
    return model


def revert_norms(model: nn.Module) -> None:
    """Undoes `apply_low_precision_layernorm` in place."""
    for module in model.modules():
        if isinstance(module, _LowPrecision):
            remove_mixin(module, _LowPrecision)
            del module.norm_dtype


def rows_of_norms(model: nn.Module) -> list[Row]:
    """The rows of `fp8.report` for norms, if any is in low precision: each norm with its precision,
    or why it was left alone.

    A norm is a module of `NORMS`, or a module without children that has "norm" in its class name. A
    norm with several names appears under the first.
    """
    other = f"computes otherwise than {', '.join(norm.__name__ for norm in NORMS)}"
    rows = []
    for name, module in _norms(model):
        done, why = LEFT_ALONE, other
        if isinstance(module, _LowPrecision):
            done, why = "low precision", _how(module)
        elif _is_supported(module):
            why = "not chosen"
        rows.append(Row(name, bare_class(module).__name__, done, why))
    if all(row.left_alone for row in rows):
        return []
    return rows


def _how(module: Any) -> str:
    dtype = module.norm_dtype
    if dtype is None:
        return "the dtype of autocast"
    return dtype_name(dtype)


def _is_supported(module: nn.Module) -> bool:
    """Whether ``module`` has the forward of a type in `NORMS`."""
    forward = bare_class(module).forward
    return any(kind.forward is forward for kind in NORMS)


def _norms(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        called = "norm" in bare_class(module).__name__.lower() and not any(
            module.children()
        )
        if called or isinstance(module, NORMS):
            yield name, module


CHANGES.append(Change(rows_of_norms, revert_norms))
