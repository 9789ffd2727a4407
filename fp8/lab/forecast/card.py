"""A GPU that this machine does not have: inside of `compiling_for`, torch, inductor and Triton
trace and compile for it. Nothing is launched; tensors on "cuda" are fake.

All private names of torch that a forecast needs are in this file and in `compiled.py`: torch has no
public way to compile for a device that is absent.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# A node of autograd's graph, which has attributes that torch's Node does not declare.
Node = Any


class Card(NamedTuple):
    """What the compiler asks of a device.

    capability: of CUDA, (9, 0) for sm_90. shared: bytes of shared memory that a block may have.
    """

    name: str
    capability: tuple[int, int]
    processors: int
    memory: int
    shared: int = 232448
    cache: int = 50 << 20

    @property
    def arch(self) -> int:
        """90 for sm_90."""
        return 10 * self.capability[0] + self.capability[1]

    @property
    def properties(self) -> types.SimpleNamespace:
        """Returns what `torch.cuda.get_device_properties` would return."""
        return types.SimpleNamespace(
            name=self.name,
            major=self.capability[0],
            minor=self.capability[1],
            multi_processor_count=self.processors,
            total_memory=self.memory,
            max_threads_per_multi_processor=2048,
            max_threads_per_block=1024,
            regs_per_multiprocessor=65536,
            warp_size=32,
            L2_cache_size=self.cache,
            shared_memory_per_block=49152,
            shared_memory_per_block_optin=self.shared,
            shared_memory_per_multiprocessor=self.shared + 1024,
            uuid="",
            pci_bus_id=0,
            gcnArchName="",
            clock_rate=1980000,
            memory_clock_rate=2619000,
            memory_bus_width=5120,
        )


CARDS: dict[str, Card] = {
    "h100": Card("NVIDIA H100 80GB HBM3", (9, 0), 132, 80 << 30),
    "h200": Card("NVIDIA H200", (9, 0), 132, 141 << 30),
    "b200": Card("NVIDIA B200", (10, 0), 148, 180 << 30, cache=126 << 20),
}
"""Name in `fp8.lab.hardware.HARDWARE` -> what the compiler asks of it: NVIDIA's tuning guides of
Hopper and Blackwell (shared memory, multiprocessors), as `cudaGetDeviceProperties` gives them."""


def why_not() -> str:
    """Why this installation of torch cannot compile for a GPU; "" if it can."""
    if torch.version.cuda is None:
        return "torch is a build without CUDA; `pip install torch` installs one with it on Linux"
    if find_spec("triton") is None:
        return "triton is not installed; it comes with torch's CUDA builds on Linux"
    return ""


@contextlib.contextmanager
def compiling_for(card: Card) -> Iterator[None]:
    """Makes torch take this machine for one with ``card``, and tensors on "cuda" fake.

    Process-wide while it is open: no other thread may use CUDA or compile. All is restored at exit.
    """
    from torch._subclasses import FakeTensorMode

    with contextlib.ExitStack() as stack:
        for patch in _patches(card):
            stack.enter_context(patch)
        stack.enter_context(_flash_attention())
        stack.enter_context(_driver(card))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield


def _patches(card: Card) -> Iterator[AbstractContextManager[object]]:
    import torch._dynamo.device_interface as interfaces
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor
    from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder
    from torch._inductor.graph import GraphLowering
    from torch._inductor.runtime import triton_helpers
    from torch._subclasses import FakeTensorMode, fake_tensor

    interface = interfaces.get_interface_for_device("cuda")
    answers = _answers(card)
    for owner in (torch.cuda, torch.cuda.graphs, interface, interface.Worker):
        for name in answers.keys() & set(dir(owner)):
            yield mock.patch.object(owner, name, _answering(owner, answers[name]))
    for name in ("get_rng_state", "set_rng_state"):
        answer = _answering(torch, answers[name])
        yield mock.patch.object(torch.cuda.random, name, answer)
    for name in ("init", "getCurrentRawStream", "isCurrentStreamCapturing"):
        nothing = _answering(torch, 0)
        yield mock.patch.object(torch._C, f"_cuda_{name}", nothing, create=True)
    # Without an accelerator the compiler asks no driver for its current stream.
    yield mock.patch.object(torch.accelerator, "is_available", _answering(torch, False))
    nothing = _answering(torch, None)
    yield mock.patch.object(triton_helpers, "set_driver_to_gpu", nothing)
    yield mock.patch.object(torch.autograd, "_engine_run_backward", _run_backward)
    no_init = property(lambda self: True)
    yield mock.patch.object(FakeTensorMode, "avoid_device_init", no_init, create=True)
    # By which torch 2.11 asks the driver in place of that.
    yield mock.patch.object(
        fake_tensor, "init_gpu_context", _answering(torch, None), create=True
    )
    deduce = UniformValueConstantFolder._deduce_value

    # The compiler computes constants, which takes memory.
    def on_cpu(self: UniformValueConstantFolder, node: torch.fx.Node) -> object:
        with _OnCpu():
            return deduce(self, node)

    yield mock.patch.object(UniformValueConstantFolder, "_deduce_value", on_cpu)
    # Constants are not copied to the device.
    yield mock.patch.object(
        GraphLowering, "constant_name", lambda self, name, device: name
    )
    # Padding of products would be timed.
    yield inductor.patch(
        compile_threads=1, force_disable_caches=True, shape_padding=False
    )
    yield functorch.patch(force_non_lazy_backward_lowering=True)


def _answers(card: Card) -> dict[str, object]:
    """Function of `torch.cuda`, or of the compiler's interface to it -> its result."""
    return {
        "is_available": True,
        "is_initialized": True,
        "is_bf16_supported": True,
        "is_current_stream_capturing": False,
        "device_count": 1,
        "current_device": 0,
        "set_device": None,
        "exchange_device": 0,
        "maybe_exchange_device": 0,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
        "_lazy_init": None,
        "synchronize": None,
        "current_stream": types.SimpleNamespace(cuda_stream=0),
        "get_raw_stream": 0,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": None,
        "get_device_name": card.name,
        "get_device_capability": card.capability,
        "get_compute_capability": card.arch,
        "get_device_properties": card.properties,
        "_get_device_properties": card.properties,
    }


def _answering(owner: object, value: object) -> object:
    """A function of its own for each answer."""

    # The compiler has tables by function, so that two answers are never one.
    def answer(*args: object, **kwargs: object) -> object:
        return value

    if isinstance(owner, type):
        return staticmethod(answer)
    return answer


class _OnCpu(TorchDispatchMode):
    """Computes constants of the compiler on the CPU."""

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        def here(x: object) -> object:
            if isinstance(x, torch.device) and x.type == "cuda":
                return "cpu"
            return x

        named = {name: here(x) for name, x in (kwargs or {}).items()}
        return func(*map(here, args), **named)


# Triton


@contextlib.contextmanager
def _driver(card: Card) -> Iterator[None]:
    """Triton's driver: one that knows the card and launches nothing."""
    target = import_module("triton.backends.compiler").GPUTarget("cuda", card.arch, 32)
    properties = {
        "max_shared_mem": card.shared,
        "multiprocessor_count": card.processors,
        "max_num_regs": 65536,
        "warpSize": 32,
        "sm_clock_rate": 1980000,
        "mem_clock_rate": 2619000,
        "mem_bus_width": 5120,
    }
    driver = types.SimpleNamespace(
        utils=types.SimpleNamespace(get_device_properties=lambda device: properties),
        get_current_target=lambda: target,
        get_current_device=lambda: 0,
        get_active_torch_device=lambda: torch.device("cuda", 0),
        get_device_interface=lambda: torch.cuda,
        is_active=lambda: True,
    )
    with mock.patch.object(import_module("triton").runtime.driver, "_active", driver):
        yield


# Attention


@contextlib.contextmanager
def _flash_attention() -> Iterator[None]:
    """`scaled_dot_product_attention` by the flash kernel: torch's choice asks the driver."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("scaled_dot_product_attention", _attention, "AutogradCUDA")
    try:
        yield
    finally:
        library._destroy()


def composed_attention(*args: object, **options: object) -> Tensor:
    """`scaled_dot_product_attention` by other operations, which store the matrix of weights."""
    composed = torch.ops.aten._scaled_dot_product_attention_math
    result: Tensor = composed(*args, **options)[0]
    return result


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if attn_mask is not None:  # torch has no flash kernel with a mask
        return composed_attention(
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )
    if enable_gqa:  # as torch's choice does
        groups = query.shape[-3] // key.shape[-3]
        key, value = (x.repeat_interleave(groups, -3) for x in (key, value))
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    return flash(query, key, value, dropout_p, is_causal, scale=scale)[0]


# Autograd

_ENGINE: Callable[..., object] = torch.autograd._engine_run_backward  # type: ignore[attr-defined]


def _run_backward(
    outputs: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    retain_graph: bool,
    create_graph: bool,
    inputs: Sequence[Tensor] = (),
    *flags: object,
    **options: object,
) -> object:
    """What computes `torch.autograd.grad`; of tensors on "cuda" by `gradients`."""
    # torch's engine asks the driver for streams.
    if not inputs or outputs[0].device.type != "cuda":
        return _ENGINE(
            outputs, grads, retain_graph, create_graph, inputs, *flags, **options
        )
    with torch.set_grad_enabled(create_graph):
        return gradients(outputs, grads, inputs)


def gradients(
    outputs: Sequence[Tensor], grads: Sequence[Tensor | None], inputs: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """The gradients of ``inputs``, by a walk over autograd's graph in Python. grads: the
    gradients of the outputs; None for ones."""
    edge_of = torch.autograd.graph.get_gradient_edge
    roots, leaves = list(map(edge_of, outputs)), list(map(edge_of, inputs))
    received: dict[Node, dict[int, Tensor]] = {}
    for edge, output, grad in zip(roots, outputs, grads, strict=True):
        if grad is None:
            grad = torch.ones_like(output)
        _receive(received, edge.node, edge.output_nr, grad)
    begin, end = [edge.node for edge in roots], {edge.node for edge in leaves}
    for node in _in_order(begin, end):
        for (after, slot), grad in _gradients(node, received.get(node, {})):
            if grad is not None:
                _receive(received, after, slot, grad)
    return tuple(received.get(edge.node, {}).get(edge.output_nr) for edge in leaves)


def _in_order(roots: Sequence[Node], leaves: set[Node]) -> list[Node]:
    """The nodes between roots and leaves, each after those whose gradients it receives."""
    reached, stack = set(roots), list(roots)
    while stack:
        after = {n for n, _ in stack.pop().next_functions if n is not None} - reached
        reached |= after
        stack += after
    # A node has a larger sequence number than those before it in the forward pass.
    order = sorted(reached, key=lambda node: node._sequence_nr())
    leading = set(leaves)
    for node in order:
        if any(n in leading for n, _ in node.next_functions):
            leading.add(node)
    return [node for node in reversed(order) if node in leading]


def _gradients(
    node: Node, received: dict[int, Tensor]
) -> Iterator[tuple[tuple[Node, int], Tensor | None]]:
    """The next nodes, each with its gradient."""
    edges = [edge for edge in node.next_functions if edge[0] is not None]
    if not received or not edges:
        return
    run, needed = node, tuple(n is not None for n, _ in node.next_functions)
    # Functions in Python are called otherwise than functions of torch.
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        run, needed = node.apply, node.needs_input_grad
    result = run(*(received.get(slot) for slot in range(len(node._input_metadata))))
    if not isinstance(result, tuple):
        result = (result,)
    grads = [grad for grad, needs in zip(result, needed, strict=False) if needs]
    yield from zip(edges, grads, strict=True)


def _receive(
    received: dict[Node, dict[int, Tensor]], node: Node, slot: int, grad: Tensor
) -> None:
    meta = node._input_metadata[slot]
    if grad.shape != meta.shape:
        grad = grad.sum_to_size(meta.shape)
    grad, slots = grad.to(meta.dtype), received.setdefault(node, {})
    if slot in slots:
        grad = slots[slot] + grad
    slots[slot] = grad
