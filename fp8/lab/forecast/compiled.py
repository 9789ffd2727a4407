"""What `torch.compile` makes of a function for a card: its kernels, with what each reads, writes
and computes."""

from __future__ import annotations

import contextlib
import math
import re
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple
from unittest import mock

import torch

TRITON, ATTENTION, OTHER = "triton", "attention", "other"
"""Kinds of kernels beside those of products, which are "fp8", "bf16" and "fp32"."""


class Kernel(NamedTuple):
    """A kernel of a compiled graph.

    kind: that of a product's operands ("fp8", "bf16", "fp32"), or TRITON, ATTENTION, OTHER. read,
    written: bytes; each argument counts once.
    """

    kind: str
    name: str
    flops: int
    read: int
    written: int

    @property
    def moved(self) -> int:
        return self.read + self.written


class Graph(NamedTuple):
    """A compiled graph. saved: bytes that the backward pass reads and the forward pass stored,
    without parameters. source: the generated code."""

    backward: bool
    kernels: tuple[Kernel, ...]
    saved: int
    source: str


def graphs(
    function: Callable[..., Any], *args: Any, options: Mapping[str, Any] | None = None
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

    def defined(self: Any, source: str, schedule: Any, kernel: Any) -> Any:
        name = define(self, source, schedule, kernel)
        for node in schedule:
            for part in node.get_nodes() if hasattr(node, "get_nodes") else ():
                fused[part.get_name()][name] = _arguments(kernel.args)
        return name

    def described(self: Any, code: Any) -> Any:
        outputs = [_layout(x) for x in self.graph_outputs]
        results.append(
            Graph(
                self.is_backward, tuple(_kernels(self, fused)), _saved(self), code.value
            )
        )
        fused.clear()

        def call(inputs: list[Any]) -> list[Any]:
            inputs.clear()
            return [
                x
                and torch.empty_strided(x.size, x.stride, dtype=x.dtype, device="cuda")
                for x in outputs
            ]

        self.cache_key, self.cache_path, self.cache_linemap = "generated", None, []
        return types.SimpleNamespace(__file__="generated", call=call)

    with (
        mock.patch.object(TritonScheduling, "define_kernel", defined),
        mock.patch.object(GraphLowering, "_compile_to_module_lines", described),
    ):
        yield


class _Layout(NamedTuple):
    size: list[int]
    stride: list[int]
    dtype: torch.dtype


def _layout(x: Any) -> _Layout | None:
    """Returns the layout of a buffer or input of a graph; None if it is not a tensor."""
    try:
        size, stride = (
            [int(s) for s in sizes] for sizes in (x.get_size(), x.get_stride())
        )
        return _Layout(size, stride, x.get_dtype())
    except (AttributeError, NotImplementedError, TypeError):
        return None


def _arguments(args: Any) -> set[str]:
    """The buffers that a Triton kernel reads or writes in memory."""
    from torch._inductor.codegen.common import RemovedArg

    buffers = {**args.input_buffers, **args.output_buffers}
    names = {name for name, x in buffers.items() if not isinstance(x, RemovedArg)}
    in_place = [
        x for x in args.inplace_buffers.values() if not isinstance(x, RemovedArg)
    ]
    return names | {name for x in in_place for name in x.other_names}


def _saved(graph: Any) -> int:
    """Bytes of the inputs of a backward graph beside parameters and gradients."""
    if not graph.is_backward:
        return 0
    layouts = {
        name: _layout(graph.graph_inputs[name])
        for name in graph.graph_input_names
        if not re.match("primals|tangents", name)
    }
    return sum(
        math.prod(x.size) * x.dtype.itemsize for x in layouts.values() if x is not None
    )


def _kernels(graph: Any, fused: dict[str, dict[str, set[str]]]) -> Iterator[Kernel]:
    """The kernels of a graph, in order. fused: node -> its Triton kernels, and the buffers that are
    arguments of each."""
    for node in graph.scheduler.nodes:
        read, written = (
            _whole(graph, node.get_read_write_buffer_accesses(r, not r))
            for r in (True, False)
        )
        kernels = {
            name: x for n in node.get_nodes() for name, x in fused[n.get_name()].items()
        }
        if kernels:  # the compiler counts what stays in registers as well
            read = {n: size for n, size in read.items() if n not in written}
            for name, arguments in kernels.items():
                sizes = (
                    sum(x[n] for n in x.keys() & arguments) for x in (read, written)
                )
                yield Kernel(TRITON, name, 0, *sizes)
        elif node.is_extern() and type(node.node).__name__ != "MultiOutput":
            name = node.node.get_kernel_name() or type(node.node).__name__
            kind, flops = _product(name, node.node)
            yield Kernel(kind, name, flops, sum(read.values()), sum(written.values()))


def _whole(graph: Any, accesses: dict[str, int]) -> dict[str, int]:
    """Buffer -> bytes. The compiler counts at most 1e9 elements of a buffer."""
    return {name: _all_of(graph, name, bytes) for name, bytes in accesses.items()}


def _all_of(graph: Any, name: str, bytes: int) -> int:
    layout = _layout(graph.get_buffer(name))
    if layout is None or bytes < 1e9 * layout.dtype.itemsize:
        return bytes
    return math.prod(layout.size) * layout.dtype.itemsize


def _product(name: str, node: Any) -> tuple[str, int]:
    """The kind of a kernel of a library, and its floating-point operations."""
    sizes = [
        [int(s) for s in x.get_size()] for x in node.inputs if hasattr(x, "get_size")
    ]
    if "attention" in name:
        (batch, heads, rows, width), (_, _, keys, _) = [
            s for s in sizes if len(s) == 4
        ][:2]
        products = 5 if "backward" in name else 2
        causal = 2 if True in node.constant_args else 1
        return ATTENTION, 2 * products * batch * heads * rows * keys * width // causal
    matrices = [s for s in sizes if len(s) in (2, 3)]
    if "addmm" in name:
        matrices = matrices[-2:]
    if "convolution" in name:
        return _bits(node), _convolution(sizes, node)
    if "mm" not in name or len(matrices) < 2:
        return OTHER, 0
    return _bits(node), 2 * math.prod(matrices[0]) * matrices[1][-1]


def _convolution(sizes: list[list[int]], node: Any) -> int:
    output = [int(s) for s in node.get_size()] if hasattr(node, "get_size") else []
    weight = sizes[1] if len(sizes) > 1 else []
    if output and weight:
        return 2 * math.prod(output) * math.prod(weight[1:])
    return 0


def _bits(node: Any) -> str:
    return {1: "fp8", 2: "bf16"}.get(node.inputs[0].get_dtype().itemsize, "fp32")
