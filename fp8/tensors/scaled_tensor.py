"""`ScaledTensor`: a tensor stored as 8- or 16-bit values of a format and one scale factor.

    x = stored * scale

For weights and gradients that take one or two bytes per element and otherwise behave like any
tensor: they accumulate and can be clipped, unscaled, copied and compiled. Operations without a
shortcut are computed from the values in the tensor's dtype; in-place results are stored again.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

from ..common.compiler import apply, eager_only
from ..formats.format import FORMATS, Format, dtype_name, get_format
from ..recipes.scaling import in_format

aten = torch.ops.aten

STORED = ("e4m3", "e5m2", "fp16")
"""The formats of the stored values: those with a NaN and a torch dtype."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that a ScaledTensor can have."""

_STEPS = (aten.addcdiv_, aten._foreach_addcdiv_, aten._fused_adam_, aten._fused_adamw_)
_AVERAGES = (aten.lerp_, aten._foreach_lerp_)
_SUMS = (aten.add_, aten._foreach_add_)
"""The in-place operations that torch's optimizers use to update a weight, and weight averages to
follow it; sums with a factor count too."""

OWN = ("stored", "scale", "whole", "writes")
"""The attributes of a ScaledTensor itself."""


class ScaledTensor(Tensor):
    """A tensor of ``dtype`` and the shape of ``stored``, with the values ``stored * scale``.

    Created by `scaled`. These operations return a ScaledTensor without rounding again: moving,
    transposing, reshaping, conversion to another supported dtype, copying from one of the same
    format, and multiplication or division by one number, which only changes the scale. The sum of
    two of the same format is rounded to a ScaledTensor. Any other result is a plain tensor.
    In-place operations are computed in the dtype and stored with a new scale. A view of a part has
    the scale of the whole and is read-only: changing it raises a NotImplementedError.

    NaN stays NaN. Inf stays Inf in e5m2 and fp16, and becomes NaN in e4m3, which has no Inf. Checks
    for nonfinite gradients (GradScaler, ``clip_grad_norm_(error_if_nonfinite=True)``) detect it.
    `copy.deepcopy` copies it; `pickle` and `torch.save` write its two plain tensors.

    Args:
        stored: values of format "e4m3", "e5m2" or "fp16", in its torch dtype, any shape.
        scale: 0-dim float32. A power of two when first stored, so that every value is exact in
            float32 (in bfloat16 too for 8-bit formats).
        dtype: the dtype of the tensor: float32, bfloat16 or float16.
        whole: False for a view of a part.
    """

    stored: Tensor
    scale: Tensor
    #: Whether the scale belongs to these values alone; False for a view of a part.
    whole: bool
    #: [number of writes], shared with views; ``.data`` has no version counter of its own.
    writes: list[int]
    #: The format in which gradients are stored; None for plain gradients.
    grad_format: str | None = None
    #: Whether an in-place operation raises if the format would round its result; for weights stored
    #: by `fp8.store_frozen`. Views and clones inherit it.
    exact: bool = False

    # torch.compile, torch.func and C++ code see this class only below autograd.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls: Any, stored: Tensor, scale: Tensor, dtype: torch.dtype, whole: bool = True
    ) -> ScaledTensor:
        return Tensor._make_wrapper_subclass(
            cls,
            stored.size(),
            strides=stored.stride(),
            storage_offset=stored.storage_offset(),
            dtype=dtype,
            device=stored.device,
        )

    def __init__(
        self, stored: Tensor, scale: Tensor, dtype: torch.dtype, whole: bool = True
    ) -> None:
        self.stored, self.scale, self.whole, self.writes = stored, scale, whole, [0]

    @property
    def format(self) -> str:
        """The name of the format of the stored values: "e4m3", "e5m2" or "fp16"."""
        return next(name for name in STORED if FORMATS[name].dtype == self.stored.dtype)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values as a plain tensor of ``dtype`` (default: its own). Not differentiable."""
        numbers = self.stored.detach().to(torch.float32) * self.scale
        return numbers.to(self.dtype if dtype is None else dtype)

    @property
    def data(self) -> Any:
        """As for any tensor, an alias without gradient. Assigning it stores the new values; shape
        and dtype are then those of the assigned tensor."""
        return Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, new: Tensor) -> None:
        numbers = new.detach().to(torch.float32)
        self._check("setting .data", numbers)
        Tensor.data.__set__(self, new)  # type: ignore[attr-defined]
        if (self.stored.shape, self.stored.device) != (new.shape, new.device):
            self.stored = self.stored.new_empty(new.shape, device=new.device)
            self.scale = self.scale.to(new.device)
        with torch.no_grad():
            self._write(numbers)

    def share_memory_(self) -> Any:
        """Moves both tensors to shared memory."""
        self.stored.share_memory_()
        self.scale.share_memory_()
        return self

    def is_shared(self) -> bool:
        return self.stored.is_shared()

    def numpy(self, *, force: bool = False) -> Any:
        """A copy of the values as an array."""
        return self.dequantize().numpy(force=force)

    def tolist(self) -> Any:
        return self.dequantize().tolist()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ScaledTensor({self.dequantize()}, format={self.format!r})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["stored", "scale"], (self.dtype, self.whole)

    @staticmethod
    def __tensor_unflatten__(
        tensors: dict[str, Tensor], context: Any, size: Any, stride: Any
    ) -> ScaledTensor:
        return ScaledTensor(tensors["stored"], tensors["scale"], *context)

    def _stable_hash_for_caching(self) -> str:
        return f"ScaledTensor {self.dtype} {self.whole}"

    def requires_grad_(self, requires_grad: bool = True) -> ScaledTensor:
        """As for any tensor. A weight that was frozen then stores its gradients in
        ``grad_format``."""
        frozen = not self.requires_grad
        super().requires_grad_(requires_grad)
        if frozen and self.grad_format is not None:
            keep_gradients_in(self, self.grad_format)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> ScaledTensor:
        if id(self) not in memo:
            parts = self.stored.clone(), self.scale.clone()
            memo[id(self)] = _rebuild(*parts, *copy.deepcopy(self._rest(), memo))
            memo[id(self)].grad = copy.deepcopy(self.grad, memo)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # As plain bytes, because pickle cannot read torch's tensors of 8-bit formats.
        bits = self.stored.view(torch.uint8) if self.stored.itemsize == 1 else self.stored
        return _rebuild, (bits, self.scale, *self._rest())

    def _rest(self) -> tuple[Any, ...]:
        """The state besides the two tensors."""
        own = {k: v for k, v in vars(self).items() if k not in OWN}
        return self.dtype, self.whole, self.requires_grad, own, self.stored.dtype

    def _write(self, numbers: Tensor) -> ScaledTensor:
        """Stores new values."""
        new = scaled(numbers, self.format)
        return self._take(new.stored, new.scale)

    @eager_only()
    def _check(self, name: str, numbers: Tensor) -> None:
        """Raises NotImplementedError if ``exact`` is set and the format would round the values.
        name: of the operation that computed them."""
        if not self.exact:
            return
        kept = scaled(numbers, self.format).dequantize(numbers.dtype)
        if not torch.allclose(kept, numbers, rtol=0, atol=0, equal_nan=True):
            raise NotImplementedError(
                f"{name} would round a weight that fp8.store_frozen keeps in few bits (merging an "
                "adapter, or a step of an optimizer): call fp8.store_frozen(model, None) first, "
                "which makes the weights plain parameters again"
            )

    def _take(self, stored: Tensor, scale: Tensor) -> ScaledTensor:
        if not self.whole:
            raise NotImplementedError(
                "this is a view of a part of a ScaledTensor, whose scale is that of the whole: "
                "change the whole, or x.copy_(y) with y = x.dequantize() changed"
            )
        self.stored.copy_(stored)
        self.scale.copy_(scale)
        self.writes[0] += 1
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d":  # it returns before the values have arrived
            raise TypeError(
                f"{func} cannot send or receive a ScaledTensor: send x.dequantize(), or x.stored "
                "and x.scale, and copy_ what is received"
            )
        shortcut = SHORTCUTS.get(func)
        result = NotImplemented if shortcut is None else shortcut(func, *args, **kwargs)
        if result is not NotImplemented:
            return result
        if func.is_view and isinstance(args[0], ScaledTensor) and func is not aten.view.dtype:
            return _viewed(func, args, kwargs)
        return _computed(func, args, kwargs)


def scaled(x: Tensor, format: str | Format, dtype: torch.dtype | None = None) -> ScaledTensor:
    """Stores ``x`` as a `ScaledTensor` in ``format``.

    The scale factor is the smallest power of two that avoids overflow of the largest finite
    magnitude; 1 if that is zero. Not differentiable.

    Args:
        x: float32, bfloat16 or float16, any shape. Rounded once, to nearest, ties to even. For Inf
            and NaN see `ScaledTensor`.
        format: "e4m3", "e5m2" or "fp16".
        dtype: the dtype of the result; by default that of ``x``.

    Returns:
        A `ScaledTensor` of the shape of ``x``.

    Raises:
        ValueError: for another format.
        TypeError: for another dtype, or if ``x`` is not a tensor.

    >>> scaled(torch.tensor([1.0, 250.0, 251.0]), "e4m3")
    ScaledTensor(tensor([  1., 256., 256.]), format='e4m3')
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"scaled: x must be a Tensor, got {type(x).__name__}")
    spec = get_format(format)
    if spec.name not in STORED:
        raise ValueError(f"a ScaledTensor has format {', '.join(STORED)}, not {spec.name!r}")
    dtype = x.dtype if dtype is None else dtype
    if dtype not in DTYPES:
        allowed = ", ".join(map(dtype_name, DTYPES))
        raise TypeError(f"a ScaledTensor stands for {allowed}, not {dtype}")
    stored, scale = in_format(plain(x.detach(), torch.float32), spec)
    return ScaledTensor(stored, scale, dtype)


def plain(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """``x`` as a plain tensor of ``dtype`` (default: its own). The gradient passes unchanged."""
    if isinstance(x, ScaledTensor):
        return apply(_Plain, x, x.dtype if dtype is None else dtype)
    return x if dtype is None else x.to(dtype)


class _Plain(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: ScaledTensor, dtype: torch.dtype) -> Tensor:
        return x.dequantize(dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.dtype = inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad.to(ctx.dtype), None


def keep_gradients_in(parameter: Any, grad_format: str | None) -> None:
    """Stores the gradient of the leaf ``parameter`` in ``grad_format`` (None: unchanged), after a
    backward pass has summed all contributions. A gradient that requires a gradient stays plain."""
    parameter.grad_format = grad_format
    if grad_format is not None and parameter.requires_grad:
        parameter.register_hook(partial(_kept, grad_format))


def _kept(format: str, grad: Tensor) -> Tensor:
    return grad if isinstance(grad, ScaledTensor) or grad.requires_grad else scaled(grad, format)


def _rebuild(
    stored: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    whole: bool,
    requires_grad: bool,
    attributes: dict[str, Any],
    kept_in: torch.dtype,
) -> ScaledTensor:
    """Restores a copied or pickled ScaledTensor. Hooks are not pickled, as in torch."""
    x = ScaledTensor(stored.view(kept_in), scale, dtype, whole)
    vars(x).update(attributes)
    return x.requires_grad_(requires_grad)


# Allows torch.load(weights_only=True) to read what torch.save wrote.
torch.serialization.add_safe_globals([_rebuild])


def _computed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Computes any operation on the values, and stores the results of in-place operations again."""
    numbers: dict[int, Tensor] = {}

    def opened(x: Any) -> Any:
        if not isinstance(x, ScaledTensor):
            return x
        if id(x) not in numbers:
            numbers[id(x)] = x.dequantize()
        return numbers[id(x)]

    result = func(*tree_map(opened, args), **tree_map(opened, kwargs))
    if not func._schema.is_mutable:
        return result
    written = [
        args[i] if i < len(args) else kwargs.get(argument.name)
        for i, argument in enumerate(func._schema.arguments)
        if argument.is_write
    ]
    kept = [x for x in tree_leaves(written) if isinstance(x, ScaledTensor)]
    if kept:
        _warn_of_small_steps(func, kwargs)
    for x in kept:
        x._check(func.overloadpacket.__name__, numbers[id(x)])
    changed = {id(numbers[id(x)]): x._write(numbers[id(x)]) for x in kept}
    return tree_map(lambda x: changed.get(id(x), x), result)


def _warn_of_small_steps(func: Any, kwargs: dict[str, Any]) -> None:
    """Warns with a UserWarning, on each call, if the in-place operation ``func`` on ScaledTensors
    is one whose changes may be rounded away, so that the values would not change."""
    kind = func.overloadpacket
    step = kind in (*_STEPS, *_AVERAGES) or func.namespace == "bitsandbytes"
    if step or (kind in _SUMS and kwargs.get("alpha", 1) != 1):
        warnings.warn(
            f"{kind.__name__} on a ScaledTensor: its format rounds small steps away. Step it by an "
            "optimizer that fp8.initialize returned; make a copy that averages weights before "
            "fp8.initialize",
            stacklevel=4,
        )


_WHOLE_VIEWS = (
    aten.alias.default,
    aten.detach.default,
    aten.permute.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.t.default,
    aten.transpose.int,
    aten.unsqueeze.default,
    aten.view.default,
)
"""Views that contain every element once, so that a new scale for them applies to the whole."""


def _viewed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A view of the stored values with the same scale."""
    x = args[0]
    whole = x.whole and func in _WHOLE_VIEWS

    def view(stored: Tensor) -> ScaledTensor:
        y = ScaledTensor(stored, x.scale, x.dtype, whole)
        y.writes, y.exact = x.writes, x.exact
        return y

    result = tree_map(view, func(x.stored, *args[1:], **kwargs))
    return return_and_correct_aliasing(func, args, kwargs, result)


def _clone(func: Any, x: ScaledTensor, **kwargs: Any) -> ScaledTensor:
    y = ScaledTensor(func(x.stored, **kwargs), x.scale.clone(), x.dtype)
    y.exact = x.exact
    return y


def _to_copy(func: Any, x: ScaledTensor, **kwargs: Any) -> Any:
    dtype = kwargs.pop("dtype", None) or x.dtype
    if dtype not in DTYPES:
        return func(x.dequantize(torch.float32), dtype=dtype, **kwargs)
    scale = func(x.scale, **{k: v for k, v in kwargs.items() if k != "memory_format"})
    return ScaledTensor(func(x.stored, **kwargs), scale, dtype)


def _copy_(func: Any, x: Tensor, source: Any, non_blocking: bool = False) -> Tensor:
    if not isinstance(x, ScaledTensor):
        return func(x, plain(source, torch.float32), non_blocking)
    if isinstance(source, ScaledTensor) and (source.shape, source.format) == (x.shape, x.format):
        return x._take(source.stored, source.scale)
    # From float32, whatever the dtype: the only rounding is that of the format.
    return x._write(plain(source, torch.float32).to(x.device).expand_as(x))


def _new_empty_strided(func: Any, x: ScaledTensor, *args: Any, **kwargs: Any) -> Any:
    """Called by autograd to copy a gradient in the layout of its parameter."""
    if kwargs.pop("dtype", None) not in (None, x.dtype):
        return NotImplemented
    return ScaledTensor(func(x.stored, *args, **kwargs), torch.ones_like(x.scale), x.dtype)


def _by_one_number(x: Any, y: Any) -> bool:
    """Whether x is a ScaledTensor and y a real number that does not change its dtype."""
    if not isinstance(x, ScaledTensor) or x.dim() == 0 or isinstance(y, ScaledTensor):
        return False
    if isinstance(y, Tensor):
        return y.dim() == 0 and not y.is_complex()
    return not isinstance(y, complex)


def _times(func: Any, x: Any, y: Any) -> Any:
    """mul and div."""
    if not _by_one_number(x, y):
        return NotImplemented
    return ScaledTensor(x.stored.clone(), func(x.scale, y).to(torch.float32), x.dtype)


def _times_(func: Any, x: Any, y: Any) -> Any:
    """mul_ and div_."""
    if not _by_one_number(x, y) or not x.whole:
        return NotImplemented
    x.scale.copy_(func(x.scale.clone(), y))
    x.writes[0] += 1
    return x


def _add(func: Any, x: Any, y: Any, **kwargs: Any) -> Any:
    both = isinstance(x, ScaledTensor) and isinstance(y, ScaledTensor)
    if not both or (x.format, x.dtype) != (y.format, y.dtype):
        return NotImplemented
    return scaled(
        func(x.dequantize(torch.float32), y.dequantize(torch.float32), **kwargs), x.format, x.dtype
    )


def _unscale(func: Any, tensors: Sequence[Tensor], found: Tensor, inverse_scale: Tensor) -> None:
    """GradScaler's check and unscaling; for a ScaledTensor only the scale changes."""
    others = [x for x in tensors if not isinstance(x, ScaledTensor)]
    if others:
        func(others, found, inverse_scale)
    for x in tensors:
        if isinstance(x, ScaledTensor):
            x.scale.mul_(inverse_scale)
            finite = x.dequantize(torch.float32).isfinite().all()
            found.copy_(torch.maximum(found, (~finite).to(found.dtype)))


SHORTCUTS: dict[Any, Callable[..., Any]] = {
    aten.detach_.default: lambda func, x: x,
    aten.clone.default: _clone,
    aten._to_copy.default: _to_copy,
    aten.copy_.default: _copy_,
    aten.new_empty_strided.default: _new_empty_strided,
    **dict.fromkeys((aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar), _times),
    **dict.fromkeys(
        (aten.mul_.Tensor, aten.mul_.Scalar, aten.div_.Tensor, aten.div_.Scalar), _times_
    ),
    aten.add.Tensor: _add,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
}
"""Operation -> its implementation for a ScaledTensor, instead of `_computed`. It returns
NotImplemented for unsupported arguments."""
