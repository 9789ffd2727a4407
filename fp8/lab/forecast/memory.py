"""The memory of a training step in eager mode, by what it is for: the step runs without its
arithmetic (`Hollow`), and every tensor that torch, the casts and the optimizer allocate counts
for as long as something holds it. It needs no GPU and no CUDA build of torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer

from ...casts.casting import PLAIN
from ...common.step import Batch, Loss, call, loss_value, seeded, tensors
from ...formats import quantize
from ...kernels import selftest
from ...kernels.kernel import Capability
from ...optim import AdamW, step
from ...optim.state import PURPOSES
from ...torch_internals import Context
from ...training.levels import LEVELS, initialize
from .card import composed_attention
from .hollow import DATA, WEIGHTS, Allocations, Hollow, key_of
from .result import Memory, OptimizerMemory


class Trained(NamedTuple):
    """A model, and the optimizer that steps it."""

    model: nn.Module
    optimizer: Optimizer


def _at_level(name: str, model: nn.Module) -> Trained:
    return Trained(*initialize(model, None, name, recipe=None))


OPTIMIZERS: dict[str, Callable[[nn.Module], Trained]] = {
    # foreach, as by default on a GPU
    "torch AdamW": lambda model: Trained(
        model, torch.optim.AdamW(model.parameters(), foreach=True)
    ),
    "fp8.optim.AdamW": lambda model: Trained(model, AdamW(model.parameters())),
    **{name: partial(_at_level, name) for name in LEVELS},
}
"""Name -> what gives a model an optimizer. A level of `fp8.initialize` sets the formats of weights
and gradients too."""


def of_passes(
    make: Callable[[], tuple[nn.Module, Batch]], loss: Loss | None = None
) -> Memory:
    """The memory of a forward and a backward pass.

    Args:
        make: returns a model and a batch of new tensors on the CPU. It runs without arithmetic.
        loss: as in `fp8.forecast`.
    """
    with seeded(None, cuda=()), Hollow() as allocations:
        model, batch = make()
        inputs = set(map(key_of, tensors(batch)))
        buffers = set(map(key_of, model.buffers()))
        allocations.mark(allocations.alive.keys() - buffers, WEIGHTS)
        allocations.mark(inputs, DATA)
        before = allocations.now
        nbytes = sum(allocations.alive[key].nbytes for key in inputs)
        kept = _passes(allocations, model, batch, loss)
        return Memory(
            weights=before - nbytes,
            batch=nbytes,
            gradients=allocations.now - before,
            peak=allocations.peak,
            **kept,
        )


def _passes(
    allocations: Allocations, model: nn.Module, batch: Batch, loss: Loss | None
) -> dict[str, int]:
    """Runs the passes. Returns what is kept between them: attribute of `Memory` -> bytes."""
    allocations.begin()
    before, packed = set(allocations.alive), dict[int, torch.dtype]()

    def pack(x: Tensor) -> Tensor:
        if type(x) in PLAIN:
            packed[key_of(x)] = x.dtype
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        output = call(model, batch)
        value = loss_value(output, loss)
    results = [x for x in tensors([output, value]) if type(x) in PLAIN]
    # The user holds the results, whether they are kept or not.
    held = set(map(key_of, results)) - packed.keys()
    kept = dict.fromkeys(("casts", "copies", "activations"), 0)
    for key in allocations.alive.keys() - before - held:
        allocation = allocations.alive[key]
        kind = _kind(allocation.origin, packed.get(key, allocation.dtype))
        kept[kind] += allocation.nbytes
    ends = [x for x in results if x.requires_grad]
    grads: list[Tensor | None] = [torch.ones_like(x) for x in ends]
    if value is not None:
        ends, grads = [value], [None]
    torch.autograd.backward(ends, grads)
    return kept


def of_optimizer(
    make: Callable[[], nn.Module], optimize: Callable[[nn.Module], Trained]
) -> OptimizerMemory:
    """The memory of a model that an optimizer steps. make: as in `of_passes`; returns the model.
    optimize: as in `OPTIMIZERS`."""
    with seeded(None, cuda=()), Hollow() as allocations:
        model, optimizer = optimize(make())
        parameters = [p for p in model.parameters() if p.requires_grad]
        for _ in range(2):  # the first step makes the state, and rounds weights
            # A ScaledTensor holds what it was until it is read.
            sum(p.nbytes for p in parameters)
            before, state = allocations.now, _state(optimizer)
            grads = [torch.empty_like(p, dtype=p.dtype) for p in parameters]
            torch.autograd.backward(parameters, grads)
            del grads
            gradients = allocations.now - before
            allocations.begin()
            with torch.no_grad():  # without hooks, by which models count their passes
                inspect.unwrap(type(optimizer).step)(optimizer)
            optimizer.zero_grad()
        weights = before - sum(state.values())
        return OptimizerMemory(weights, gradients, state, allocations.peak)


def _kind(origin: str, dtype: torch.dtype) -> str:
    """The attribute of `Memory` for what is kept."""
    if origin == WEIGHTS:
        return "copies"
    if dtype.itemsize == 1 and "float" in str(dtype):  # two of FP4 in one
        return "casts"
    return "activations"


def _state(optimizer: Optimizer) -> dict[str, int]:
    """What a tensor of the state is for -> bytes."""
    nbytes: dict[str, int] = {}
    for entries in optimizer.state.values():
        for name, value in entries.items():
            purpose = PURPOSES.get(name, name)
            nbytes[purpose] = nbytes.get(purpose, 0) + value.nbytes
    return nbytes


# What differs on a GPU


# More elements than any tensor has.
WHOLE = 1 << 62


@contextmanager
def on_gpu(capability: Capability) -> Iterator[None]:
    """Tensors on the CPU take the paths of a GPU of this capability: kernels of products, norms,
    dropout and attention, and no loops over parts that fit a processor's cache."""
    library = torch.library.Library("aten", "IMPL")
    for name, function in _OF_GPUS.items():
        library.impl(name, function, "AutogradCPU")
    try:
        with (
            selftest.trusted(capability),
            mock.patch.object(quantize, "CHUNK", WHOLE),
            mock.patch.object(step, "CHUNK", WHOLE),
        ):
            yield
    finally:
        library._destroy()


class _RMSNorm(Function):
    """What torch's kernel allocates and keeps (torch 2.11 to 2.14); a CPU composes it."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor | None, dims: int) -> Tensor:
        ones = (1,) * dims
        inverse = x.new_empty((*x.shape[: x.dim() - dims], *ones), dtype=torch.float32)
        ctx.save_for_backward(x, weight, inverse)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, _ = ctx.saved_tensors
        dx = torch.empty_like(x)
        if weight is None:
            return dx, None, None
        return dx, torch.empty_like(weight), None


def _rms_norm(
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    if weight is not None and weight.dtype != x.dtype:  # composed on a GPU too
        wide, dims = x.float(), tuple(range(-len(shape), 0))
        inverse = torch.rsqrt(wide.square().mean(dims, keepdim=True))
        return (wide * inverse).to(x.dtype) * weight
    result: Tensor = _RMSNorm.apply(x, weight, len(shape))
    return result


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    if p == 0 or not train:
        return x
    result, _ = torch.native_dropout(x, p, train)
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
    """Attention by a kernel that stores no matrix of weights, also with dropout."""
    if query.dim() != 4:
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
    if attn_mask is not None:
        attn_mask = attn_mask.detach().to(query.dtype)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return flash(query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]


_OF_GPUS: dict[str, Callable[..., Tensor]] = {
    "rms_norm": _rms_norm,
    "dropout": _dropout,
    "scaled_dot_product_attention": _attention,
}
"""Operator of ATen -> what it is on a GPU in place of its composition of others on a CPU."""
