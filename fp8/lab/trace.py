"""Lists the matrix products of a model: their sizes, their layers, and whether they can be cast."""

from __future__ import annotations

import math
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from ..common.copies import deep_copy
from ..common.step import Batch, call, copied, running_modules, tensors, untouched
from ..layers.convert import convert
from ..layers.report import report
from ..layers.select import check_values_set
from ..products.grouped import MULTIPLY_GROUPS
from ..warnings import PitfallWarning, strict

__all__ = ["Product", "trace"]

aten = torch.ops.aten


@dataclass(frozen=True)
class Product:
    """The matrix products of one layer (or of one call without a weight) in a training step.

    Attributes:
        layer: the name of the module that owns the weight, "(model)" for the model itself; for
            products of activations, the name of the module that is running.
        kind: "linear", "convolution" or "matmul".
        m, k, n: sizes of the forward product, (m, k) times (k, n), per call; m counts tokens.
        calls: the number of such products in one forward pass.
        weight_elements: the number of elements of the weight; 0 without one.
        why_not: why `fp8.convert` does not cast it; "" if it does.
        input_elements: the number of elements of the input per call; 0: m * k. A convolution reads
            fewer.
    """

    layer: str
    kind: str
    m: int
    k: int
    n: int
    calls: int = 1
    weight_elements: int = 0
    why_not: str = ""
    input_elements: int = 0

    @property
    def flops(self) -> int:
        """Floating-point operations of the forward product; a training step has three times as
        many."""
        return 2 * self.m * self.k * self.n * self.calls


def _of_convolution(
    x: Tensor, w: Tensor, output: Tensor, transposed: bool, groups: int
) -> Product:
    """A convolution is the product of unfolded patches and the kernel, once per group."""
    pixels = output[:, 0].numel()
    k = w[0].numel()
    n = w.shape[0] // groups
    if transposed:  # the other way round
        pixels, k, n = x[:, 0].numel(), n, k
    inputs = x.numel() // groups
    return Product("", "convolution", pixels, k, n, groups, input_elements=inputs)


# ATen product -> the position of its first factor; the second one follows.
_MATRICES = {aten.mm: 0, aten.bmm: 0, aten.addmm: 1, aten.baddbmm: 1}

# Grouped products: torch's, and the product of converted layers.
_GROUPED = (aten._grouped_mm, MULTIPLY_GROUPS)

# What follows the name of the layer in the name of a parameter that its weight is computed of.
_OF_PARAMETRIZATION = re.compile(r"\.?parametrizations\..*")


class _Weights:
    """The layer of a weight, by its storage; of tied layers the one that is running. What is
    computed of weights alone (a copy by autocast, a parametrization) belongs to their layers too.
    On the meta device, where storages have no address, a weight is known by its size."""

    def __init__(self, model: nn.Module) -> None:
        self._by_storage: dict[int, list[str]] = {}
        self._sizes: dict[str, set[int]] = {}
        self._neutral = {
            buffer.untyped_storage().data_ptr() for buffer in model.buffers()
        }
        # Kept, so that no other tensor gets their storage.
        self._computed: list[Tensor] = []
        for name, parameter in model.named_parameters(remove_duplicate=False):
            layer = _OF_PARAMETRIZATION.sub("", name)
            if layer == name:
                layer = name.rpartition(".")[0]
            address = parameter.untyped_storage().data_ptr()
            self._by_storage.setdefault(address, []).append(layer)
            self._sizes.setdefault(layer, set()).add(parameter.numel())

    def compute(self, arguments: Sequence[object], output: object) -> None:
        addresses = list(map(_address, tensors(arguments)))
        layers: dict[str, None] = {}
        for address in addresses:
            layers |= dict.fromkeys(self._by_storage.get(address, ()))
        others = set(addresses) - self._by_storage.keys() - self._neutral
        if others or not layers:
            return
        for x in tensors(output):
            if _address(x) and _address(x) not in self._by_storage:
                self._by_storage[_address(x)] = list(layers)
                self._computed.append(x)

    def owner(self, weight: Tensor, running: str) -> str | None:
        """The name of the layer, or None if it is no weight."""
        if weight.is_meta:
            if weight.numel() in self._sizes.get(running, ()):
                return running
            return None
        layers = self._by_storage.get(_address(weight), [])
        if running in layers:
            return running
        return next(iter(layers), None)


def _address(x: Tensor) -> int:
    """The address of the storage of a tensor; 0 if it has none. Raises ValueError for a tensor of
    other tensors: of a library for low precision, or sharded."""
    try:
        if x.layout == torch.strided:
            return x.untyped_storage().data_ptr()
        return 0
    except RuntimeError:
        raise ValueError(
            f"a {type(x).__name__} cannot be traced: pass the model with plain tensors, as it is "
            "before another library converts or shards its layers"
        ) from None


class _Trace(TorchDispatchMode):
    """Collects the products of a forward pass. running: the names of the modules that are
    running."""

    def __init__(self, weights: _Weights, running: Sequence[str]) -> None:
        super().__init__()
        self.products: Counter[Product] = Counter()
        self._weights = weights
        self._running = running

    def __torch_dispatch__(
        self,
        function: Any,
        types: object,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        output = function(*args, **(kwargs or {}))
        op = function.overloadpacket
        if op in _MATRICES:
            a, b = args[_MATRICES[op] :][:2]
            (*batch, m, k), n = a.shape, b.shape[-1]
            self._add(Product("", "linear", m, k, n, math.prod(batch)), b)
        elif op is aten.convolution:
            # (x, w, bias, stride, padding, dilation, transposed, output_padding, groups)
            x = args[0]
            w = args[1]
            transposed = args[6]
            groups = args[8]
            self._add(_of_convolution(x, w, output, transposed, groups), w)
        elif op in _GROUPED:
            # Each row of a matrix is multiplied by the weight of one group.
            a, b = args[:2]
            if a.dim() == 3 and b.dim() == 2:
                a, b = b.mT, a.mT
            rows = a.shape[:-1].numel()
            inner = a.shape[-1]
            self._add(Product("", "linear", rows, inner, b.shape[-1]), b)
        else:
            self._weights.compute(args, output)
        return output

    def _add(self, product: Product, weight: Tensor) -> None:
        """weight: the tensor that may be one."""
        path = next(reversed(self._running), "")
        owner = self._weights.owner(weight, path)
        row = replace(product, layer=owner or path or "(model)", calls=1)
        if owner is not None:
            row = replace(row, weight_elements=weight.numel())
        elif row.kind == "linear":
            row = replace(row, kind="matmul")
        self.products[row] += product.calls


@contextmanager
def quiet() -> Iterator[None]:
    """Within the block, policies that a user would be warned of are tried without a warning."""
    with strict(False), warnings.catch_warnings():
        warnings.simplefilter("ignore", PitfallWarning)
        yield


def left_alone(model: nn.Module) -> dict[str, str]:
    """Layer -> why `fp8.convert` does not cast it."""
    with quiet():
        rows = report(convert(deep_copy(model), "tensor", backend="simulate"))
    return {row.path or "(model)": row.why for row in rows.left_alone}


def trace(model: nn.Module, batch: Batch) -> list[Product]:
    """The matrix products of one forward pass of a copy, as ATen computes them, and which are not
    cast. Products of the same sizes and layer are one row, in the order of their first call.
    Recurrent layers may be one kernel, which shows none.
    """
    check_values_set("the list of products", model)
    why_not = left_alone(model)
    # In evaluation torch computes encoder layers by one kernel, which shows no product.
    model = deep_copy(model).train()
    with (
        untouched(model),
        torch.no_grad(),
        sdpa_kernel(SDPBackend.MATH),  # which is decomposed into two products
        running_modules(model) as names,
    ):
        mode = _Trace(_Weights(model), names)
        with mode:
            call(model, copied(batch))
    rows = []
    for product, calls in mode.products.items():
        why = "no weight: cast under fp8.autocast only"
        if product.weight_elements:
            why = why_not.get(product.layer, "")
        rows.append(replace(product, calls=calls, why_not=why))
    return rows
