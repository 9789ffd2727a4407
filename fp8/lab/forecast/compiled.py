"""What `torch.compile` makes of a function for a card: its kernels, with what each reads, writes
and computes."""

from __future__ import annotations

import contextlib
import math
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

# Objects of inductor: its GraphLowering, and its nodes, buffers and arguments of kernels. They are
# private, and differ between versions.
Lowering = Any
Node = Any

# Kinds of kernels beside products, whose kinds are "fp8", "bf16" and "fp32".
TRITON, ATTENTION, OTHER = "triton", "attention", "other"


class Kernel(NamedTuple):
    """A kernel of a compiled graph.

    kind: the format of a product's operands ("fp8", "bf16", "fp32"), or TRITON, ATTENTION, OTHER.
    read, written: bytes; each argument counts once. narrowest: the least dimension of a product.
    """

    kind: str
    name: str
    flops: int
    read: int
    written: int
    narrowest: float = math.inf

    @property
    def moved(self) -> int:
        return self.read + self.written


class Graph(NamedTuple):
    """A compiled graph. saved: bytes that the backward pass reads and the forward pass stored,
    without parameters. source: the generated code. inputs: name -> layout, None for a number."""

    backward: bool
    kernels: tuple[Kernel, ...]
    saved: int
    source: str
    inputs: Mapping[str, Layout | None] = types.MappingProxyType({})


def graphs(
    function: Callable[..., object],
    *args: object,
    options: Mapping[str, Any] | None = None,
) -> list[Graph]:
    """The graphs of ``torch.compile(function, options=options)(*args)``, inside of
    `card.compiling_for`. Forward graphs come first; graph breaks make several."""
    results: list[Graph] = []
    torch.compiler.reset()
    try:
        with _capturing(results):
            torch.compile(function, dynamic=False, options=dict(options or {}))(*args)
    finally:
        torch.compiler.reset()
    return sorted(results, key=lambda graph: graph.backward)


@contextlib.contextmanager
def _capturing(results: list[Graph]) -> Iterator[None]:
    """Replaces the loading of generated code: the graph is described, and fake tensors returned."""
    from torch._inductor.codegen.triton import TritonScheduling
    from torch._inductor.graph import GraphLowering

    fused: dict[str, dict[str, set[str]]] = defaultdict(dict)
    define = TritonScheduling.define_kernel

    def defined(
        self: TritonScheduling, source: str, schedule: list[Node], kernel: Node
    ) -> str:
        name = define(self, source, schedule, kernel)
        # Markers of loops, which have no nodes, are part of a schedule too.
        for node in (n for n in schedule if hasattr(n, "get_nodes")):
            for part in node.get_nodes():
                fused[part.get_name()][name] = _arguments(kernel.args)
        return name

    def described(self: Lowering, code: Node) -> types.SimpleNamespace:
        outputs = [_layout(x) for x in self.graph_outputs]
        kernels = tuple(_kernels(self, fused))
        inputs = {x: _layout(self.graph_inputs[x]) for x in self.graph_input_names}
        saved = _saved(self.is_backward, inputs)
        results.append(Graph(self.is_backward, kernels, saved, code.value, inputs))
        fused.clear()

        def call(inputs: list[object]) -> list[Tensor | None]:
            inputs.clear()  # as generated code does, which frees them
            return [x and x.empty() for x in outputs]

        self.cache_key, self.cache_path, self.cache_linemap = "generated", None, []
        return types.SimpleNamespace(__file__="generated", call=call)

    with (
        mock.patch.object(TritonScheduling, "define_kernel", defined),
        mock.patch.object(GraphLowering, "_compile_to_module_lines", described),
    ):
        yield


class Layout(NamedTuple):
    """The layout of a buffer or of an input."""

    size: list[int]
    stride: list[int]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.size) * self.dtype.itemsize

    def empty(self) -> Tensor:
        return torch.empty_strided(
            self.size, self.stride, dtype=self.dtype, device="cuda"
        )


def _layout(x: Node) -> Layout | None:
    """Returns the layout of a buffer or input of a graph; None if it is not a tensor."""
    try:
        size = list(map(int, x.get_size()))
        return Layout(size, list(map(int, x.get_stride())), x.get_dtype())
    except (AttributeError, NotImplementedError, TypeError):
        return None


def _arguments(args: Node) -> set[str]:
    """The buffers that a Triton kernel reads or writes in memory."""
    from torch._inductor.codegen.common import RemovedArg

    buffers = {**args.input_buffers, **args.output_buffers}
    names = {name for name, x in buffers.items() if not isinstance(x, RemovedArg)}
    for x in args.inplace_buffers.values():
        if not isinstance(x, RemovedArg):
            names.update(x.other_names)
    return names


def _saved(backward: bool, inputs: Mapping[str, Layout | None]) -> int:
    """Bytes of the inputs of a backward graph beside parameters and gradients."""
    if not backward:
        return 0
    return sum(x.nbytes for name, x in inputs.items() if x and not is_given(name))


def is_given(name: str) -> bool:
    """Whether an input of a graph is an argument of the function or the gradient of a result, by
    the names that AOTAutograd gives them."""
    return name.startswith(("primals", "tangents"))


def _kernels(
    graph: Lowering, fused: dict[str, dict[str, set[str]]]
) -> Iterator[Kernel]:
    """The kernels of a graph, in order. fused: node -> its Triton kernels, and the buffers that are
    arguments of each."""
    for node in graph.scheduler.nodes:
        read = _whole(graph, node.get_read_write_buffer_accesses(True, False))
        written = _whole(graph, node.get_read_write_buffer_accesses(False, True))
        kernels: dict[str, set[str]] = {}
        for part in node.get_nodes():
            kernels |= fused[part.get_name()]
        if kernels:  # the compiler counts what stays in registers as well
            read = {n: size for n, size in read.items() if n not in written}
            for name, arguments in kernels.items():
                both = (
                    sum(x[n] for n in x.keys() & arguments) for x in (read, written)
                )
                yield Kernel(TRITON, name, 0, *both)
        elif node.is_extern() and type(node.node).__name__ != "MultiOutput":
            name = _name(node.node)
            moved = sum(read.values()), sum(written.values())
            yield _product(Kernel(OTHER, name, 0, *moved), node.node)


def _name(node: Node) -> str:
    """The name of a library's function; of a copy between devices the class."""
    try:
        return node.get_kernel_name() or type(node).__name__
    except AssertionError:
        return type(node).__name__


def _whole(graph: Lowering, accesses: dict[str, int]) -> dict[str, int]:
    """Buffer -> bytes."""
    sizes = dict(accesses)
    for name, size in accesses.items():
        layout = _layout(graph.get_buffer(name))
        # The compiler counts at most 1e9 elements of a buffer.
        if layout is not None and size >= 1e9 * layout.dtype.itemsize:
            sizes[name] = layout.nbytes
    return sizes


def _product(kernel: Kernel, node: Node) -> Kernel:
    """A kernel of a library with its kind and its floating-point operations."""
    tensors = (x for x in node.inputs if hasattr(x, "get_size"))
    sizes = [list(map(int, x.get_size())) for x in tensors]
    if "attention" in kernel.name:
        query, key = [s for s in sizes if len(s) == 4][:2]
        # Forward q k^T and p v; backward q k^T again, dv, dp, dq and dk.
        products = 5 if "backward" in kernel.name else 2
        causal = 2 if True in node.constant_args else 1
        flops = 2 * products * math.prod(query) * key[2] // causal
        return kernel._replace(kind=ATTENTION, flops=flops)
    matrices = [s for s in sizes if len(s) in (2, 3)]
    if "addmm" in kernel.name:
        matrices = matrices[-2:]
    if "convolution" in kernel.name:
        return kernel._replace(kind=_bits(node), flops=_convolution(sizes, node))
    if "mm" not in kernel.name or len(matrices) < 2:
        return kernel
    flops = 2 * math.prod(matrices[0]) * matrices[1][-1]
    narrowest = min(*matrices[0][-2:], matrices[1][-1])
    return kernel._replace(kind=_bits(node), flops=flops, narrowest=narrowest)


def _convolution(sizes: list[list[int]], node: Node) -> int:
    if not hasattr(node, "get_size") or len(sizes) < 2:
        return 0
    return 2 * math.prod(map(int, node.get_size())) * math.prod(sizes[1][1:])


def _bits(node: Node) -> str:
    return {1: "fp8", 2: "bf16"}.get(node.inputs[0].get_dtype().itemsize, "fp32")
