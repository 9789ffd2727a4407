"""Seeing a model run: every torch call with its place in the model and where its inputs came from.

The model runs once, without gradients, on copies of the inputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from fp8.autocast import EXPANDED, FIRST_LOOK

__all__ = ["Graph", "Input", "Node", "Recorder", "Slot"]

Slot = tuple[int | str, ...]
"""Where a tensor stands in a call: (1,) the second argument, ("weight",), (0, 2) within a list."""

Key = tuple[str, str, int]
"""(module path, kind, how many of that kind came before it in that module)."""

_MASKING = -1e4
"""A term below this is a mask, not a value: half of them are -inf, the others as low as fits."""


@dataclass(frozen=True)
class Input:
    """A tensor that goes into a call: its slot, the node it comes from, its element count."""

    slot: Slot
    node: int
    numel: int


@dataclass
class Node:
    """One call, or a tensor that comes from outside (key None): a parameter, an input, a buffer."""

    key: Key | None
    name: str
    function: Callable[..., Any] | None = None
    inputs: list[Input] = field(default_factory=list)
    numel: int = 0
    parameter: str | None = None
    live: bool = False  # whether a gradient can flow through it
    floating: bool = False
    masking: bool = False


@dataclass
class Graph:
    """The calls of a model in order; each refers to earlier ones only."""

    nodes: list[Node] = field(default_factory=list)

    def consumers(self) -> list[list[int]]:
        """For each node, those that read it, in order."""
        readers: list[list[int]] = [[] for _ in self.nodes]
        for index, node in enumerate(self.nodes):
            for source in dict.fromkeys(i.node for i in node.inputs):
                readers[source].append(index)
        return readers


def tensors_in(value: Any, slot: Slot = ()) -> Iterator[tuple[Slot, Tensor]]:
    """The tensors of arguments, through lists, tuples and dicts, each with its slot."""
    if isinstance(value, Tensor):
        yield slot, value
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from tensors_in(item, (*slot, i))
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from tensors_in(item, (*slot, name))


class Recorder(TorchFunctionMode):
    """Fills a `Graph` while a model runs.

    kinds: the table of `transforms.calls`. parameters: names by id. live: the ids of the tensors
    that gradients are for. path: gives the module that is running.
    """

    def __init__(
        self,
        kinds: dict[Callable[..., Any], str],
        parameters: dict[int, str],
        live: set[int],
        path: Callable[[], str],
    ) -> None:
        super().__init__()
        self.graph = Graph()
        self._kinds = kinds
        self._parameters = parameters
        self._live = live
        self._path = path
        self._counts: Counter[tuple[str, str]] = Counter()
        self._node_of: dict[int, int] = {}
        self._kept: list[Tensor] = []  # an id names a tensor only while the tensor lives
        self._busy = False

    def __enter__(self) -> Recorder:
        FIRST_LOOK.append(self)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        FIRST_LOOK.remove(self)
        super().__exit__(*error)

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self._busy:
            return function(*args, **kwargs)
        if function in EXPANDED:
            with self:
                return EXPANDED[function](*args, **kwargs)
        self._busy = True
        try:
            inputs = [
                Input(slot, self._source(t), t.numel())
                for slot, t in (*tensors_in(args), *tensors_in(kwargs))
            ]
            output = function(*args, **kwargs)
            self._add(function, inputs, args, output)
            return output
        finally:
            self._busy = False

    def _source(self, tensor: Tensor) -> int:
        """The node that a tensor comes from; a new one for a tensor not seen before."""
        if id(tensor) not in self._node_of:
            name = self._parameters.get(id(tensor))
            floating = tensor.is_floating_point()
            node = Node(None, name or "input", numel=tensor.numel(), parameter=name)
            node.floating = floating
            node.masking = _any_masking([tensor])
            node.live = id(tensor) in self._live and not node.masking
            self._remember(tensor, node)
        return self._node_of[id(tensor)]

    def _remember(self, tensor: Tensor, node: Node) -> None:
        self.graph.nodes.append(node)
        self._node_of[id(tensor)] = len(self.graph.nodes) - 1
        self._kept.append(tensor)

    def _add(
        self,
        function: Callable[..., Any],
        inputs: list[Input],
        args: tuple[Any, ...],
        output: Any,
    ) -> None:
        kind = self._kinds.get(function)
        written = [t for _, t in tensors_in(output)]
        if kind == "__setitem__" and isinstance(args[0], Tensor):
            written = [args[0]]
        if not written and kind is None:
            return
        name = getattr(function, "__name__", str(function))
        key = None
        if kind is not None:
            path = self._path()
            key = (path, kind, self._counts[path, kind])
            self._counts[path, kind] += 1
        nodes = self.graph.nodes
        node = Node(key, name, function, inputs)
        node.floating = any(t.is_floating_point() for t in written)
        node.live = node.floating and kind != "detach" and any(nodes[i.node].live for i in inputs)
        node.numel = max((t.numel() for t in written), default=0)
        node.masking = node.floating and not node.live and _any_masking(written)
        nodes.append(node)
        for tensor in written:
            self._node_of[id(tensor)] = len(nodes) - 1
            self._kept.append(tensor)


def _any_masking(tensors: list[Tensor]) -> bool:
    return any(bool((t <= _MASKING).any()) for t in tensors if t.is_floating_point())
