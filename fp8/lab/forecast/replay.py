"""The memory of compiled code: the functions that the compiler generates run with kernels that do
nothing, on fake tensors, and what is alive is counted.

The private names here occur in the generated code (torch 2.11 to 2.14).
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from .compiled import Graph
from .hollow import Allocations

WORKSPACE = 32 << 20
"""Bytes that torch reserves for cuBLAS in each thread that multiplies, the forward and the backward
one, and once for the products of cuBLASLt, as FP8 ones: on Hopper (aten/src/ATen/cuda/
CublasHandlePool.cpp, CUDABlas.cpp)."""

# What generated code has as arguments and results.
Output = Any


class Replayed(NamedTuple):
    """The bytes of a graph beside the arguments of the function, as its parameters.

    peak: the most that is alive while it runs. left: its results. tangents: those of its inputs
    that are gradients of the function's results.
    """

    peak: int
    left: int
    tangents: int


def peak(compiled: Sequence[Graph], holds: bool) -> int:
    """The most bytes of a step beside parameters and the batch, with the workspaces of cuBLAS.
    Inside of `card.compiling_for`. holds: whether the user holds the function's results and their
    gradients; otherwise the result is a loss."""
    backward = [graph for graph in compiled if graph.backward]
    forward = [graph for graph in compiled if not graph.backward]
    most = kept = 0
    # Graphs of a step run one after the other, and keep what their backward graphs read.
    for graph, after in zip(forward, backward, strict=True):
        most = max(most, kept + replayed(graph).peak)
        kept += after.saved
    # Backward graphs free what they have read; gradients that they return stay.
    received, gradients = None, 0
    for graph in reversed(backward):
        kept -= graph.saved
        found = replayed(graph, holds and received is None)
        if received is None and holds:  # and the results themselves
            kept += found.tangents
        elif received is not None:
            gradients -= found.tangents
        most = max(most, kept + gradients + found.peak)
        received = found.left
        gradients += found.left
    kinds = {kernel.kind for graph in compiled for kernel in graph.kernels}
    return most + WORKSPACE * (2 + ("fp8" in kinds))


def replayed(graph: Graph, holds: bool = False) -> Replayed:
    """Runs the code of a graph. holds: whether its tangents stay alive."""
    call, inputs = _loaded(graph.source), dict[str, Output]()
    for name, layout in graph.inputs.items():
        inputs[name] = 0 if layout is None else layout.empty()
    given = [x for name, x in inputs.items() if name.startswith("primals")]
    tangents = [x for name, x in inputs.items() if name.startswith("tangents")]
    size = sum(x.nbytes for x in tangents)
    if not holds:
        tangents.clear()
    with Allocations() as allocations:
        allocations.add(given)
        before = allocations.now
        arguments = allocations.add(list(inputs.values()))
        inputs.clear()
        results = call(arguments)
        left = allocations.now - before - sum(x.nbytes for x in tangents)
        del results
    return Replayed(allocations.peak - before, left, size)


def _loaded(source: str) -> Output:
    """The function of generated code, with kernels that do nothing."""
    from torch._inductor.async_compile import AsyncCompile

    kernel = types.SimpleNamespace(run=_nothing)
    names: dict[str, Output] = {"__name__": "generated"}
    # Kernels are not compiled: only the allocations of the generated code count.
    with mock.patch.object(AsyncCompile, "triton", return_value=kernel):
        exec(compile(source, "generated", "exec"), names)
    names |= dict.fromkeys((x for x in names if x.startswith("assert_")), _nothing)
    names["copy_if_misaligned"] = lambda x: x
    names["empty_strided_cuda"] = _empty
    names["reinterpret_tensor"] = _reinterpreted
    names["extern_kernels"] = _Library()
    return names["call"]


class _Library:
    """Kernels of libraries, which write to ``out``."""

    def __getattr__(self, name: str) -> Output:
        return _nothing


def _nothing(*args: object, **options: object) -> None:
    pass


def _empty(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cuda")


def _reinterpreted(
    x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int
) -> Tensor:
    return torch.as_strided(x, size, stride, x.storage_offset() + offset)
