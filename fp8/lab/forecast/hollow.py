"""The memory that operations allocate: `Allocations` counts what is alive. Inside of `Hollow`,
operations allocate their results and compute nothing.

The memory of a large result is reserved by the operating system and never touched, so that a model
of any size fits. Tensors have the classes and devices of a real run on a CPU.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ...casts.casting import PLAIN

# Results of at most so many bytes, which control flow may read, are ones, and integers zeros. The
# memory of others is whatever it was.
SMALL = 4096

# Origins. What is computed of both is data.
WEIGHTS, DATA = "weights", "data"

# An operator of ATen, a storage, and a result: torch declares none for this use.
Operator = Any
Storage = Any
Output = Any


class Allocation(NamedTuple):
    """The memory of a tensor, and of the tensors that share it.

    dtype: the dtype of the tensor that came first. origin: WEIGHTS or DATA if it is computed from
    them, "" if from neither.
    """

    nbytes: int
    dtype: torch.dtype
    origin: str = ""


class _Layout(NamedTuple):
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def empty(self) -> Tensor:
        x = torch.empty_strided(
            self.size, self.stride, dtype=self.dtype, device=self.device
        )
        if x.untyped_storage().nbytes() <= SMALL:
            x.fill_(self.dtype.is_floating_point)
        return x


class _Same(NamedTuple):
    """A result that is the argument at this place."""

    place: int


class _View:
    """A result that shares the memory of an argument."""


class Allocations(TorchDispatchMode):
    """Within the block, the memory of the results of operations is counted, not what their kernels
    allocate besides.

    Attributes:
        alive: id of a storage -> its allocation.
        now, peak: bytes that are alive, and the most of them since `begin`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, Allocation] = {}
        self.now = self.peak = 0

    def begin(self) -> None:
        """Counts the peak from here on."""
        self.peak = self.now

    def mark(self, keys: Iterable[int], origin: str) -> None:
        """Sets the origin of allocations."""
        for key in keys:
            self.alive[key] = self.alive[key]._replace(origin=origin)

    def add(self, output: Output, origin: str = "") -> Output:
        """Counts the storages of tensors until nothing holds them. Returns ``output``."""
        for x in pytree.tree_leaves(output):
            if isinstance(x, Tensor) and key_of(x) not in self.alive:
                storage: Storage = x.untyped_storage()
                found = Allocation(storage.nbytes(), x.dtype, origin)
                self.alive[id(storage)] = found
                self.now += found.nbytes
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._free, id(storage)).atexit = False
        return output

    def _free(self, key: int) -> None:
        self.now -= self.alive.pop(key).nbytes

    def __torch_dispatch__(
        self,
        func: Operator,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        return self.add(func(*args, **(kwargs or {})))


class Hollow(Allocations):
    """Within the block, operations allocate their results and compute nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._fake = FakeTensorMode()
        self._results: dict[object, tuple[list[object], object]] = {}

    def __torch_dispatch__(
        self,
        func: Operator,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if not all(kind in PLAIN for kind in types):  # their own operations follow
            return NotImplemented
        kwargs = dict(kwargs or {})
        leaves, form = pytree.tree_flatten((args, kwargs))
        inputs = [x for x in leaves if isinstance(x, Tensor)]
        origin = self._origin(inputs)
        # Numbers, which control flow reads (a counter of steps), are computed.
        if inputs and all(x.numel() <= 1 for x in inputs):
            return self.add(func(*args, **kwargs), origin)
        try:
            results, result_form = self._described(func, leaves, form)
        except DataDependentOutputException:  # of torch.equal: any value will do
            return func(*args, **kwargs)
        made_here = [x for x in results if isinstance(x, _Layout)]
        if not inputs and all(x.size.numel() <= 1 for x in made_here):
            return self.add(func(*args, **kwargs), origin)
        if any(isinstance(x, _View) for x in results):
            return func(*args, **kwargs)
        made = []
        for result in results:
            if isinstance(result, _Layout):
                result = result.empty()
                self.add(result, origin)
            elif isinstance(result, _Same):
                result = leaves[result.place]
            made.append(result)
        return pytree.tree_unflatten(made, result_form)

    def _described(
        self, func: Operator, leaves: list[Any], form: object
    ) -> tuple[list[object], Any]:
        """What the results of an operation are, by torch's own functions of shapes."""
        if "_scaled_mm" in str(func):
            return pytree.tree_flatten(_product(leaves), is_leaf=_is_layout)
        key = (func, form, *map(_key, leaves))
        try:
            return self._results[key]
        except KeyError:
            self._results[key] = result = self._run(func, leaves, form)
            return result
        except TypeError:  # an argument without a hash
            return self._run(func, leaves, form)

    def _run(
        self, func: Operator, leaves: list[Any], form: Any
    ) -> tuple[list[object], Any]:
        with self._fake:
            fakes = [_layout(x).empty() if isinstance(x, Tensor) else x for x in leaves]
            args, kwargs = pytree.tree_unflatten(fakes, form)
            outputs, result_form = pytree.tree_flatten(func(*args, **kwargs))
        places = {id(x): i for i, x in enumerate(fakes) if isinstance(x, Tensor)}
        storages = {id(x.untyped_storage()) for x in fakes if isinstance(x, Tensor)}
        return [_described(x, places, storages) for x in outputs], result_form

    def _origin(self, inputs: Iterable[Tensor]) -> str:
        """The origin of a tensor that is computed from these."""
        found = {
            self.alive[key].origin for key in map(key_of, inputs) if key in self.alive
        }
        return next((origin for origin in (DATA, WEIGHTS) if origin in found), "")


def _product(leaves: Iterable[object]) -> _Layout:
    """The result of a product of FP8 operands, of which torch's function of shapes refuses those
    with scales by blocks (2.13)."""
    leaves = list(leaves)
    a, b, *_ = (x for x in leaves if isinstance(x, Tensor))
    dtype = next(x for x in leaves if isinstance(x, torch.dtype))
    size = torch.Size((a.shape[0], b.shape[1]))
    return _Layout(size, (b.shape[1], 1), dtype, a.device)


def _is_layout(x: object) -> bool:
    return isinstance(x, _Layout)


def key_of(x: Tensor) -> int:
    """The key of the tensor's allocation in `Allocations.alive`."""
    return id(x.untyped_storage())


def _key(leaf: object) -> object:
    if isinstance(leaf, Tensor):
        return _layout(leaf)
    return type(leaf), leaf  # 1, 1.0 and True are equal


def _layout(x: Tensor) -> _Layout:
    return _Layout(x.size(), x.stride(), x.dtype, x.device)


def _described(x: object, places: Mapping[int, int], storages: set[int]) -> object:
    if not isinstance(x, Tensor):
        return x
    if id(x) in places:
        return _Same(places[id(x)])
    if id(x.untyped_storage()) in storages:
        return _View()
    return _layout(x)
