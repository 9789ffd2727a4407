"""`ScaledTensor`: a tensor stored as 8- or 16-bit values of a format and their scale factors.
Views, ``.data`` and entries of a state_dict share its memory."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, SupportsIndex

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import increment_version
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

from ..common.compiler import eager_only
from ..formats.format import FORMATS, Format, dtype_name, get_format
from ..formats.quantize import in_dtype
from ..recipes.scaling import Tile, in_format, widened
from ..torch_internals import Arguments, Context, Keywords, Memo, TorchFunction
from ..torch_internals.autograd_functions import apply

aten = torch.ops.aten

#: An operator of ATen, whose class is private.
OpOverload = Any

#: The formats of the stored values: those with a NaN and a torch dtype.
STORED = ("e4m3", "e5m2", "fp16")

#: The dtypes that a ScaledTensor can have.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

#: The attributes that hold the values of a ScaledTensor.
STATE = ("memory", "_stored", "_of")


@dataclass(eq=False)
class Memory:
    """The storage that a ScaledTensor shares with its views. values: in the dtype of the format, to
    be multiplied by ``scale``; without a scale, in any dtype. tile: the values of the last two
    dimensions that share a scale; None: all. rounds: whether ``copy_`` rounds to the format: of a
    gradient, for averages over processes. remembers: whether a write keeps the memory before it,
    in ``origin``, until `store`: of a frozen weight, for `fp8.training.lost_updates`."""

    values: Tensor
    scale: Tensor | None
    format: str
    tile: Tile | None = None
    rounds: bool = False
    remembers: bool = False
    origin: Memory | None = None

    def view(self, x: Tensor) -> Tensor:
        offset = x.storage_offset() + self.values.storage_offset()
        return self.values.as_strided(x.size(), x.stride(), offset)

    def scales(self) -> Any:
        """The scale factors, which broadcast to the values."""
        if self.scale is None or self.tile is None:
            return self.scale
        return widened(self.scale, self.values.shape, self.tile, broadcast=True)

    def before_write(self) -> Memory | None:
        """What ``origin`` is to be after a write that is not rounded."""
        if self.remembers and self.scale is not None:
            return replace(self)
        return self.origin

    def numbers(self) -> Tensor:
        """The values in float32, as a plain tensor."""
        if self.scale is None:
            return self.values.to(torch.float32)
        return self.values.to(torch.float32) * self.scales()

    def become(self, dtype: torch.dtype, scale: Tensor | None) -> None:
        old = self.values
        # What inference mode makes can be written in inference mode alone.
        with torch.inference_mode(False):
            new = torch.empty_strided(
                old.size(),
                old.stride(),
                dtype=dtype,
                device=old.device,
            )
        self.values, self.scale = new, scale


class ScaledTensor(Tensor):
    """A tensor of ``dtype`` with the values ``stored * scale``.

    Moving, transposing, reshaping and conversion to another supported dtype return a ScaledTensor
    without rounding again. Any other result is a plain tensor. Multiplication or division by one
    number in place only changes the scale.

    In-place operations are exact: they store the values of the whole tensor in float32, with a
    scale of None. `store` rounds them to the format again. ``copy_`` does so at once if no value
    changes, and for gradients that `keep_gradients_in` stores. ``.data = y`` shares the memory of
    y, in its dtype.

    NaN stays NaN. Inf stays Inf in e5m2 and fp16, and becomes NaN in e4m3, which has no Inf. Checks
    for nonfinite gradients (GradScaler, ``clip_grad_norm_(error_if_nonfinite=True)``) detect it.
    `pickle` and `torch.save` write parameters unchanged, and other tensors (entries of a
    state_dict) as float32 tensors, which represent them exactly.
    """

    memory: Memory
    _stored: Tensor
    _of: Tensor
    #: The format in which gradients are stored; None for plain gradients.
    grad_format: str | None = None

    # torch.compile, torch.func and C++ code see this class only below autograd.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls: Any,
        memory: Memory,
        dtype: torch.dtype,
        stored: Tensor | None = None,
    ) -> ScaledTensor:
        like = memory.values if stored is None else stored
        return Tensor._make_wrapper_subclass(
            cls,
            like.size(),
            strides=like.stride(),
            storage_offset=like.storage_offset() - memory.values.storage_offset(),
            dtype=dtype,
            device=like.device,
        )

    def __init__(
        self,
        memory: Memory,
        dtype: torch.dtype,
        stored: Tensor | None = None,
    ) -> None:
        self._share(memory, memory.values if stored is None else stored)

    def _share(self, memory: Memory, stored: Tensor) -> None:
        self.memory, self._stored, self._of = memory, stored, memory.values

    @property
    def stored(self) -> Tensor:
        """The values before multiplication by the scale, in the dtype of the format or a write."""
        if self._of is not self.memory.values:
            self._share(self.memory, self.memory.view(self))
        return self._stored

    @property
    def scale(self) -> Tensor | None:
        """float32: 0-dim, or one for each tile. `store` makes it a power of two, so that values are
        exact in float32 (8-bit ones in bfloat16 too). None after a write that is not rounded."""
        return self.memory.scale

    @property
    def format(self) -> str:
        """The name of the format that `store` rounds to."""
        return self.memory.format

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """The number of bytes of the values and the scale."""
        return self.stored.nbytes + (0 if self.scale is None else self.scale.nbytes)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """A copy of the values as a `torch.Tensor` of ``dtype`` (None: its own); no gradient."""
        if self.scale is not None and self.memory.tile:
            whole = self.memory.numbers()
            numbers = whole.as_strided(
                self.size(), self.stride(), self.storage_offset()
            )
        else:
            numbers = self.stored.detach().to(torch.float32)
            numbers = numbers.clone() if self.scale is None else numbers * self.scale
        return numbers.to(self.dtype if dtype is None else dtype)

    def store(self, numbers: Tensor | None = None) -> ScaledTensor:
        """Stores ``numbers`` (None: its values) in the format, rounded as by `scaled`."""
        if numbers is None and self.scale is not None:
            return self
        if numbers is None:
            numbers = self.dequantize(torch.float32)
        new = numbers.to(torch.float32)
        # Autograd detects by the version that a saved tensor was written.
        increment_version(self)
        tile = (self.is_whole() and self.memory.tile) or (0, 0)
        return self._take(*in_format(new, FORMATS[self.format], tile))

    def _take(self, stored: Tensor, scale: Tensor) -> ScaledTensor:
        """Copies values of the format and their scales; into a view of a part, their product."""
        if not self.is_whole():
            self.written().copy_(stored.to(torch.float32) * scale)
            return self
        if self.scale is None:
            self.memory.become(stored.dtype, torch.empty_like(scale))
        self.stored.copy_(stored)
        self.memory.scale.copy_(scale)  # type: ignore[union-attr]
        self.memory.origin = None
        return self

    def is_whole(self) -> bool:
        """Whether its scales belong to these values alone, in this order."""
        values, tile = self.memory.values, self.memory.tile
        ordered = (self.shape, self.stride()) == (values.shape, values.stride())
        if tile:
            return ordered
        return self.numel() == values.numel()

    def is_scaled(self) -> bool:
        """Whether a copy of the values can take the scales."""
        return self.memory.tile is None or self.is_whole()

    def written(self) -> Tensor:
        """The memory to write its values to, without a scale: float32, if it was in the format."""
        memory, scale = self.memory, self.memory.scales()
        if scale is not None:
            old = memory.values
            memory.origin = memory.before_write()
            memory.become(torch.float32, None)
            torch.mul(old.to(torch.float32), scale, out=memory.values)
        return self.stored

    @property
    def data(self) -> Any:
        """An alias without gradient. Assignment takes the memory, shape and dtype of a tensor."""
        return Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, new: Tensor) -> None:
        if not isinstance(new, ScaledTensor):
            memory = Memory(new.detach(), None, self.format)
            memory.remembers = self.memory.remembers
            memory.origin = self.memory.before_write()
            new = ScaledTensor(memory, new.dtype)
        Tensor.data.__set__(self, new)  # type: ignore[attr-defined]
        self._share(new.memory, new.stored)

    def share_memory_(self) -> NoReturn:
        raise NotImplementedError(
            "processes do not share a ScaledTensor: share x.dequantize()"
        )

    def storage(self) -> Any:
        """The storage of its values. Like a write, it converts them to float32."""
        raw = self.written()
        if raw.dtype != self.dtype:
            raise RuntimeError(
                f"{self.dtype} has its values in {raw.dtype}: pass x.dequantize()"
            )
        return raw.untyped_storage()

    def data_ptr(self) -> int:
        """The address of its values, as `storage`."""
        self.storage()
        return self.stored.data_ptr()

    def numpy(self, *, force: bool = False) -> Any:
        """A copy of the values as an array, which is read-only."""
        # A write to the copy would be lost.
        array = self.dequantize().numpy(force=force)
        array.flags.writeable = False
        return array

    def tolist(self) -> Any:
        return self.dequantize().tolist()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ScaledTensor({self.dequantize()}, format={self.format!r})"

    def __tensor_flatten__(self) -> tuple[list[str], Arguments]:
        if not self.is_scaled():
            raise NotImplementedError(
                "a view of scaled tiles leaves a graph as x.dequantize()"
            )
        names = ["stored"]
        if self.scale is not None:
            names.append("scale")
        return names, (self.dtype, self.format, self.memory.tile)

    @staticmethod
    def __tensor_unflatten__(
        tensors: dict[str, Tensor],
        context: Arguments,
        size: object,
        stride: object,
    ) -> ScaledTensor:
        dtype, format, tile = context
        return ScaledTensor(
            Memory(tensors["stored"], tensors.get("scale"), format, tile), dtype
        )

    def _stable_hash_for_caching(self) -> str:
        # A part of the key of torch.compile's cache of graphs on disk.
        return f"ScaledTensor {self.dtype} {self.format} {self.memory.tile}"

    def requires_grad_(self, requires_grad: bool = True) -> ScaledTensor:
        """Sets whether autograd records operations on the tensor.

        The gradient of a weight that was frozen is stored in ``grad_format``.
        """
        frozen = not self.requires_grad
        super().requires_grad_(requires_grad)
        if frozen and self.grad_format is not None:
            keep_gradients_in(self, self.grad_format)
        return self

    def __deepcopy__(self, memo: Memo) -> ScaledTensor:
        if id(self) not in memo:
            memory = copy.deepcopy(self.memory, memo)
            new = ScaledTensor(memory, self.dtype, memory.view(self))
            vars(new).update(copy.deepcopy(self._attributes(), memo))
            memo[id(self)] = new.requires_grad_(self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: SupportsIndex) -> Arguments:
        if not (isinstance(self, torch.nn.Parameter) and self.is_scaled()):
            return self.dequantize(torch.float32).__reduce_ex__(protocol)
        # As plain bytes, because pickle cannot read torch's tensors of 8-bit formats.
        stored = self.stored
        bits = stored.view(torch.uint8) if stored.itemsize == 1 else stored
        settings = (self.dtype, self.format, self.requires_grad, self._attributes())
        tile = self.memory.tile
        return _rebuild, (bits, self.scale, *settings, stored.dtype, tile)

    def _attributes(self) -> Keywords:
        return {k: v for k, v in vars(self).items() if k not in STATE}

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: OpOverload,
        types: object,
        args: Arguments = (),
        kwargs: Keywords | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d":  # it returns before the values have arrived
            what = f"{func} cannot send or receive a ScaledTensor"
            raise TypeError(f"{what}: send x.dequantize(), or x.stored and x.scale")
        shortcut = SHORTCUTS.get(func)
        result = NotImplemented if shortcut is None else shortcut(func, *args, **kwargs)
        if result is not NotImplemented:
            return result
        if torch.Tag.inplace_view in func.tags:
            what = f"{func} cannot change the shape or the storage of a ScaledTensor in place"
            raise NotImplementedError(f"{what}: assign x.data = y")
        views = func.is_view and func is not aten.view.dtype
        if views and isinstance(args[0], ScaledTensor):
            return _viewed(func, args, kwargs)
        return _computed(func, args, kwargs)


def scaled(
    x: Tensor,
    format: str | Format,
    dtype: torch.dtype | None = None,
) -> ScaledTensor:
    """Stores ``x`` as a `ScaledTensor` in ``format``, rounded once, to nearest, ties to even.

    The scale factor is the smallest power of two that avoids overflow of the largest finite
    magnitude; 1 if that is zero. Not differentiable. For Inf and NaN see `ScaledTensor`.

    Args:
        x: float32, bfloat16 or float16, any shape.
        format: "e4m3", "e5m2" or "fp16".
        dtype: the dtype of the result; by default the dtype of ``x``.

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
        raise ValueError(
            f"a ScaledTensor has format {', '.join(STORED)}, not {spec.name!r}"
        )
    if dtype is None:
        dtype = x.dtype
    if dtype not in DTYPES:
        allowed = ", ".join(map(dtype_name, DTYPES))
        raise TypeError(f"a ScaledTensor stands for {allowed}, not {dtype}")
    stored, scale = in_format(dequantized(x.detach(), torch.float32), spec)
    return ScaledTensor(Memory(stored, scale, spec.name), dtype)


def dequantized(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """``x`` as a `torch.Tensor` of ``dtype`` (None: that of x). The gradient passes unchanged."""
    if isinstance(x, ScaledTensor):
        return apply(_Dequantize, x, x.dtype if dtype is None else dtype)
    if dtype is None:
        return x
    return x.to(dtype)


def store(x: Tensor, numbers: Tensor) -> None:
    """Writes ``numbers`` to ``x``, rounded to its dtype or, of a ScaledTensor, to its format."""
    x.store(numbers) if isinstance(x, ScaledTensor) else x.copy_(numbers)


class _Dequantize(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: ScaledTensor, dtype: torch.dtype) -> Tensor:
        return x.dequantize(dtype)

    @staticmethod
    def setup_context(ctx: Context, inputs: Arguments, output: Tensor) -> None:
        ctx.dtype = inputs[0].dtype

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad.to(ctx.dtype), None


def keep_gradients_in(parameter: Any, grad_format: str | None) -> None:
    """Stores the gradient of the leaf ``parameter`` in ``grad_format`` after one backward pass;
    later passes add to it in float32. One that requires a gradient stays plain."""
    parameter.grad_format = grad_format
    if grad_format is not None and parameter.requires_grad:
        parameter.register_hook(_Rounding(grad_format))


class _Rounding:
    """The hook of `keep_gradients_in`: a gradient is the first if that of the last is gone."""

    def __init__(self, format: str) -> None:
        self.format = format
        self.last: Callable[[], Memory | None] = lambda: None

    def __call__(self, grad: Tensor) -> Tensor:
        if isinstance(grad, ScaledTensor) or grad.requires_grad:
            return grad
        if self.last() is not None:
            return ScaledTensor(
                Memory(grad.to(torch.float32), None, self.format), grad.dtype
            )
        stored = gradient(grad, self.format)
        self.last = weakref.ref(stored.memory)
        return stored


def gradient(
    grad: Tensor,
    format: str,
    dtype: torch.dtype | None = None,
) -> ScaledTensor:
    """`scaled`, as a gradient."""
    stored = scaled(grad, format, dtype)
    stored.memory.rounds = True
    return stored


def _rebuild(bits: Tensor, scale: Tensor | None, *settings: Any) -> ScaledTensor:
    """Hooks are not pickled, as in torch."""
    dtype, format, requires_grad, attributes, stored_dtype, *tile = settings
    x = ScaledTensor(Memory(bits.view(stored_dtype), scale, format, *tile), dtype)
    vars(x).update(attributes)
    return x.requires_grad_(requires_grad)


# Allows torch.load(weights_only=True) to read what torch.save wrote.
torch.serialization.add_safe_globals([_rebuild])


def _computed(func: OpOverload, args: Arguments, kwargs: Keywords) -> Any:
    """Computes any operation on the values, and stores results that it writes in float32."""
    outputs = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.is_write:
            outputs.append(args[i] if i < len(args) else kwargs.get(argument.name))
    written = {id(x): x for x in tree_leaves(outputs) if isinstance(x, ScaledTensor)}
    numbers: dict[int, Tensor] = {}
    for x in tree_leaves((args, kwargs)):
        if isinstance(x, ScaledTensor) and id(x) not in numbers:
            in_place = id(x) in written and x.written().dtype == x.dtype
            numbers[id(x)] = x.stored if in_place else x.dequantize()
    opened = tree_map(lambda x: numbers.get(id(x), x), (args, kwargs))
    result = func(*opened[0], **opened[1])
    for key, x in written.items():
        if numbers[key] is not x.stored:
            x.stored.copy_(numbers[key])
    changed = {id(numbers[key]): x for key, x in written.items()}
    return tree_map(lambda x: changed.get(id(x), x), result)


def _viewed(func: OpOverload, args: Arguments, kwargs: Keywords) -> Any:
    x, *options = args
    if func is aten.as_strided.default:
        size, stride, offset = (*options, x.storage_offset())[:3]
        options = [size, stride, offset + x.memory.values.storage_offset()]
    parts = func(x.stored, *options, **kwargs)
    with torch.inference_mode(x.is_inference()):
        result = tree_map(lambda stored: ScaledTensor(x.memory, x.dtype, stored), parts)
    return return_and_correct_aliasing(func, args, kwargs, result)


def _to_copy(func: OpOverload, x: ScaledTensor, **kwargs: Any) -> Any:
    dtype = kwargs.pop("dtype", None) or x.dtype
    if dtype not in DTYPES or not x.is_scaled():
        return func(x.dequantize(dtype), **kwargs)
    options = {k: v for k, v in kwargs.items() if k != "memory_format"}
    scale = None if x.scale is None else func(x.scale, **options)
    memory = Memory(func(x.stored, **kwargs), scale, x.format, x.memory.tile)
    if x.is_whole():
        memory.remembers, memory.origin = x.memory.remembers, x.memory.origin
    return ScaledTensor(memory, dtype)


def _copy_(
    func: OpOverload,
    x: Tensor,
    source: Any,
    non_blocking: bool = False,
) -> Tensor:
    # From float32, whatever the dtype.
    if not isinstance(x, ScaledTensor):
        return func(x, dequantized(source, torch.float32), non_blocking)
    narrow = isinstance(source, ScaledTensor) and source.scale is not None
    alike = narrow and (source.format, source.memory.tile) == (x.format, x.memory.tile)
    fits = alike and source.is_scaled() and source.shape == x.shape
    if fits and x.is_whole():
        return x._take(source.stored, source.scale)
    numbers = dequantized(source, torch.float32).to(x.device).expand_as(x)
    if x.memory.rounds:
        return x.store(numbers)
    exact = _exact(x, numbers)
    if exact is not None:
        return x._take(*exact)
    func(x.written(), numbers)
    return x


@eager_only(otherwise=None)
def _exact(x: ScaledTensor, numbers: Tensor) -> tuple[Tensor, Tensor] | None:
    """``numbers`` in the format of ``x`` and their scales; None if that rounds, or x is wider."""
    format = FORMATS[x.format]
    if x.scale is None or not x.is_whole():
        return None
    if x.memory.tile:
        scale, scales = x.scale.clone(), x.memory.scales()
        stored = in_dtype(numbers / scales, format.dtype)
    else:
        stored, scale = in_format(numbers, format)
        scales = scale
    back = stored.to(torch.float32) * scales
    if torch.allclose(back, numbers, rtol=0, atol=0, equal_nan=True):
        return stored, scale
    return None


def _new_empty_strided(
    func: OpOverload,
    x: ScaledTensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Called by autograd to copy a gradient in the layout of its parameter."""
    if kwargs.pop("dtype", None) not in (None, x.dtype) or x.memory.tile:
        return NotImplemented
    scale = None if x.scale is None else torch.ones_like(x.scale)
    stored = func(x.stored, *args, **kwargs)
    return ScaledTensor(
        Memory(stored, scale, x.format, rounds=x.memory.rounds), x.dtype
    )


def _times_(func: OpOverload, x: Any, y: Any) -> Any:
    """By one real number that does not change the dtype."""
    if not isinstance(x, ScaledTensor) or x.scale is None or not x.is_whole():
        return NotImplemented
    one_number = not isinstance(y, Tensor) or (y.dim() == 0 and not y.is_complex())
    if not one_number or x.dim() == 0 or isinstance(y, ScaledTensor | complex):
        return NotImplemented
    x.scale.copy_(func(x.scale.clone(), y))
    return x


def _add_(func: OpOverload, x: Any, y: Any, **kwargs: Any) -> Any:
    if not isinstance(x, ScaledTensor):
        return NotImplemented
    if isinstance(y, ScaledTensor):
        y = y.stored if y.scale is None else y.dequantize(torch.float32)
    # In float32, whatever the dtype: gradients of micro-batches are added up.
    func(x.written(), y, **kwargs)
    return x


def _unscale(
    func: OpOverload,
    tensors: Sequence[Tensor],
    found_inf: Tensor,
    inverse: Tensor,
) -> None:
    """GradScaler's check and unscaling, which changes only the scale of a ScaledTensor."""
    others = []
    for x in tensors:
        if isinstance(x, ScaledTensor) and x.scale is not None:
            # The scale alone changes, so that nothing is rounded again.
            x.mul_(inverse)
            finite = x.dequantize(torch.float32).isfinite().all()
            found_inf.copy_(torch.maximum(found_inf, (~finite).to(found_inf.dtype)))
        else:
            others.append(x.written() if isinstance(x, ScaledTensor) else x)
    if others:
        func(others, found_inf, inverse)


SHORTCUTS: dict[OpOverload, TorchFunction] = {
    aten.detach_.default: lambda func, x: x,
    **dict.fromkeys((aten.clone.default, aten._to_copy.default), _to_copy),
    aten.copy_.default: _copy_,
    aten.new_empty_strided.default: _new_empty_strided,
    **dict.fromkeys((aten.mul_.Tensor, aten.mul_.Scalar), _times_),
    **dict.fromkeys((aten.div_.Tensor, aten.div_.Scalar), _times_),
    aten.add_.Tensor: _add_,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
}
"""Operation -> its implementation in place of `_computed`, or NotImplemented for arguments."""
