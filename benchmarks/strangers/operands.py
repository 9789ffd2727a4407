"""What a cast would see: the RMS of every operand of every matrix product and convolution that
ATen runs.

A dispatch mode below autograd sees the operands as the kernels get them, after all that a transform
does, in the forward and in the backward pass. Each operand is a weight, an activation or a gradient
by what it is computed from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode

from fp8.products.grouped import MULTIPLY_GROUPS

__all__ = [
    "HIGH",
    "JUDGED",
    "KINDS",
    "LOW",
    "PRODUCTS",
    "Operand",
    "Operands",
    "run_backward",
    "tensors",
]

aten = torch.ops.aten

KINDS = ("activation", "weight", "gradient")

JUDGED = ("activation", "gradient")
"""The kinds that a model is judged by. The factor of a convolution rides in its weight, after the
cast, so that the RMS of a weight here is not that of what is cast."""

ORDER = ("weight", "gradient", "activation", "")
"""Which operand of a product of the backward pass tells best where it belongs."""

OUTSIDE = None
"""In place of a path: of a product in a loss that is no part of the model, which nothing casts."""

LOW, HIGH = 1 / 4, 4.0

#: ATen operation -> the place of the kernel that a factor rides in, as in that of a hypernetwork.
KERNELS = {aten.convolution: 1, aten.convolution_backward: 2}

#: ATen operation -> the places of its operands.
PRODUCTS: dict[Any, tuple[int, ...]] = {
    aten.mm: (0, 1),
    aten.bmm: (0, 1),
    aten.mv: (0, 1),
    aten.dot: (0, 1),
    aten.addmm: (1, 2),
    aten.addmv: (1, 2),
    aten.addbmm: (1, 2),
    aten.baddbmm: (1, 2),
    aten._grouped_mm: (0, 1),
    MULTIPLY_GROUPS: (0, 1),
    aten._trilinear: (0, 1, 2),
    aten.convolution: (0, 1),
    aten.convolution_backward: (0, 1, 2),
    aten._scaled_dot_product_flash_attention_for_cpu: (0, 1, 2),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (0, 1, 2, 3),
    aten.mkldnn_rnn_layer: (0, 1, 2, 5),
    aten.mkldnn_rnn_layer_backward: (0, 1, 2, 5, 10),
}


@dataclass(frozen=True)
class _Origin:
    """What a tensor is computed from. kind: of KINDS; None for constants. softmax: whether it is
    the output of a softmax, moved or multiplied by constants. scores: whether it is computed from
    the gradient of a softmax's input."""

    kind: str | None = None
    softmax: bool = False
    scores: bool = False


_CONSTANT = _Origin()


@dataclass(frozen=True)
class Operand:
    """One operand of one product.

    product: its number in the step. place: of the operand among the arguments. path: of the module.
    scores: whether it is the gradient of attention's logits. on_grid: whether every value is one
    of the format of its kind; None where nobody asked.
    """

    product: int
    call: str
    path: str
    place: int
    kind: str
    rms: float
    softmax: bool = False
    scores: bool = False
    on_grid: bool | None = None

    @property
    def counted(self) -> bool:
        """Whether its RMS is asked for: neither the output of a softmax nor all zeros."""
        return not self.softmax and self.rms != 0

    @property
    def inside(self) -> bool:
        return LOW <= self.rms <= HIGH

    @property
    def distance(self) -> float:
        """From RMS 1 in octaves, infinite for what is not finite."""
        return abs(math.log2(self.rms)) if 0 < self.rms < math.inf else math.inf

    def __str__(self) -> str:
        name = "gradient of scores" if self.scores else self.kind
        return f"{name} {self.rms:.2g} in {self.call} at {self.path or '(model)'}"


def tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in nested lists, tuples, dicts and objects with attributes."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors(item)
    elif hasattr(value, "__dict__") and not isinstance(value, type | nn.Module):
        yield from tensors(vars(value))


class Operands(TorchDispatchMode):
    """Reads one training step of a model, which `running` encloses.

    on_grid: (operand, kind) -> whether it has the values of a format.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Any = (),
        on_grid: Callable[[Tensor, str], bool] | None = None,
    ) -> None:
        super().__init__()
        self.operands: list[Operand] = []
        self.products = 0
        self._on_grid = on_grid
        self._names = {id(module): name for name, module in model.named_modules()}
        self._path: list[str | None] = []
        self._origins: dict[int, _Origin] = {}
        self._places: dict[
            int, str | None
        ] = {}  # storage -> the module of the product that reads it
        self._held: list[Any] = []  # no address is given out twice
        for tensor in tensors(batch):
            self._note(tensor, _Origin("activation"))
        for tensor in model.parameters():
            self._note(tensor, _Origin("weight"))

    @contextmanager
    def running(self) -> Iterator[None]:
        """With the mode on, and the names of the modules known."""
        enter = register_module_forward_pre_hook(self._enter)
        leave = register_module_forward_hook(self._leave, always_call=True)
        try:
            with self:
                yield
        finally:
            enter.remove()
            leave.remove()

    def gradient(self, tensor: Tensor) -> Tensor:
        """The same; it is the gradient that a backward pass starts from."""
        self._note(tensor, _Origin("gradient"))
        return tensor

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._path.append(self._names.get(id(module), self._path[-1] if self._path else OUTSIDE))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._path.pop()

    def _note(self, tensor: Tensor, origin: _Origin) -> None:
        key = _storage(tensor)
        if key is not None:
            self._origins[key] = origin
            self._held.append(tensor.untyped_storage())

    def _origin(self, tensor: Tensor) -> _Origin:
        return self._origins.get(_storage(tensor) or 0, _CONSTANT)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        packet = func.overloadpacket
        inputs = list(tensors((args, kwargs)))
        if packet in PRODUCTS:
            self._product(packet, args)
        output = func(*args, **kwargs)
        origin = self._joined(packet, [self._origin(t) for t in inputs])
        for tensor in tensors(output):
            self._note(tensor, origin)
        return output

    def _joined(self, packet: Any, inputs: list[_Origin]) -> _Origin:
        known = [origin for origin in inputs if origin.kind is not None]
        kinds = {origin.kind for origin in known}
        kind = next((k for k in ("gradient", "activation", "weight") if k in kinds), None)
        if packet in (aten._softmax, aten._safe_softmax):
            return _Origin(kind, softmax=True)
        if packet is aten._softmax_backward_data:
            return _Origin(kind, scores=True)
        moved = packet not in PRODUCTS and bool(known)
        return _Origin(
            kind,
            softmax=moved and all(origin.softmax for origin in known),
            scores=moved
            and all(origin.scores for origin in known if origin.kind == "gradient")
            and kind == "gradient",
        )

    def _product(self, packet: Any, args: tuple[Any, ...]) -> None:
        read = [(i, args[i]) for i in PRODUCTS[packet] if isinstance(args[i], Tensor)]
        if packet is aten.convolution_backward:
            of_input, of_weight, _ = args[10]
            read = [(i, t) for i, t in read if (True, of_weight, of_input)[i]]
        origins = [self._origin(t) for _, t in read]
        if all(origin.kind is None for origin in origins):
            return  # made of constants
        path = self._place([t for _, t in read], [origin.kind for origin in origins])
        if path is OUTSIDE:
            return
        for (place, tensor), origin in zip(read, origins, strict=True):
            kind = origin.kind or "activation"
            if kind == "activation" and place == KERNELS.get(packet):
                kind = "weight"
            on_grid = None if self._on_grid is None else self._on_grid(tensor, kind)
            self.operands.append(
                Operand(
                    product=self.products,
                    call=packet.__name__,
                    path=path,
                    place=place,
                    kind=kind,
                    rms=_rms(tensor),
                    softmax=origin.softmax,
                    scores=origin.scores,
                    on_grid=on_grid,
                )
            )
        self.products += 1

    def _place(self, read: list[Tensor], kinds: list[str | None]) -> str | None:
        """The module of a product, or OUTSIDE of the model. In the backward pass it is that of the
        forward product with the same weight; without a weight, that of the last product of the
        gradient with one, or of the forward product with the same activation."""
        keys = [_storage(tensor) or 0 for tensor in read]
        if "gradient" not in kinds:
            path = self._path[-1] if self._path else OUTSIDE
            self._places.update(dict.fromkeys(keys, path))
            return path
        order = sorted(zip(keys, kinds, strict=True), key=lambda k: ORDER.index(k[1] or ""))
        path = next((self._places[key] for key, _ in order if key in self._places), "")
        if "weight" in kinds:
            self._places.update({key: path for key, kind in order if kind == "gradient"})
        return path

    def share(self, kind: str) -> float | None:
        """The share of the operands of a kind with an RMS in [1/4, 4]; None where there are none.

        Aside are the outputs of softmaxes, and operands of zeros alone.
        """
        inside = [
            operand.inside for operand in self.operands if operand.counted and operand.kind == kind
        ]
        return sum(inside) / len(inside) if inside else None

    @property
    def zeros(self) -> int:
        """The number of operands that are all zeros."""
        return sum(operand.rms == 0 for operand in self.operands)

    def worst(self, count: int = 1) -> list[Operand]:
        """The activations and gradients farthest from RMS 1 of those outside of the range."""
        judged = [o for o in self.operands if o.counted and o.kind in JUDGED]
        outside = [o for o in judged if not o.inside]
        return sorted(outside, key=lambda o: -o.distance)[:count]

    def uncast(self) -> list[Operand]:
        """The operands that are not on the grid.

        Aside are outputs of softmaxes and gradients of scores: within fused attention, which ATen
        may compute as products, no recipe casts them.
        """
        inner = [o for o in self.operands if not (o.softmax or o.scores)]
        return [o for o in inner if not o.on_grid]

    def cast(self) -> int:
        """The number of products without an operand in `uncast`."""
        return self.products - len({o.product for o in self.uncast()})


def _storage(tensor: Tensor) -> int | None:
    if tensor.layout is not torch.strided:
        return None
    return tensor.untyped_storage().data_ptr() or None


def _rms(tensor: Tensor) -> float:
    if not tensor.numel():
        return 0.0
    values = tensor.detach()
    values = values.abs() if values.is_complex() else values
    return float(values.double().square().mean().sqrt())


def run_backward(
    output: Any, loss: Tensor | None, mark: Callable[[Tensor], Tensor] = lambda g: g
) -> None:
    """The backward pass from a loss, or with independent standard normal numbers for the gradient
    of every output tensor, the same at every call.

    mark: `Operands.gradient`.
    """
    if loss is not None:
        torch.autograd.backward([loss], [mark(torch.ones_like(loss))])
        return
    outputs = [t for t in tensors(output) if t.requires_grad]
    if not outputs:
        raise ValueError("no output requires a gradient")
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(t.shape, generator=generator).to(t.dtype) for t in outputs]
    torch.autograd.backward(outputs, [mark(g) for g in grads])
