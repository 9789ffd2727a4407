"""DDP communication hook that averages gradients over processes in one byte per element.

Each element is rounded twice, as a contribution and as the mean. Therefore the format is e3m4: two
of its roundings have the error of one of e4m3. The missing range is in the scale factor, a power of
two for each `BLOCK` elements, the same on all processes.
"""

# No annotations from __future__: DDP compares the annotations of its hook with types.

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from ..formats.format import Format
from ..formats.quantize import quantize
from ..recipes.rules import RULES

__all__ = ["BLOCK", "GRADIENT_FORMAT", "HookState", "all_reduce_hook"]

BLOCK = 32
"""Elements of a bucket that share a scale, as in OCP MX; the scales are E8M0."""

GRADIENT_FORMAT = Format(
    name="e3m4", exponent_bits=3, mantissa_bits=4, bias=3, max=31.0, infinity=False, nan=False
)
"""The format that is sent: 256 finite values, normal from 2**-2. Inf and NaN are encoded in the
scale."""

SATURATED = 1e-5
"""The share of saturated values above which the pre-scale is halved (FP8-LM, arXiv:2310.18313,
section 2.1, also for the next two)."""

LARGEST = 2.0
GROWTH = 4.0 ** (1 / 1000)
"""The upper limit of the pre-scale, and its growth per step: from 1/2 to 2 in 1000 steps."""

_NONFINITE = 255  # NaN of E8M0 and the largest byte, so it survives every maximum


class HookState:
    """The state of `all_reduce_hook`: the process group and the pre-scale.

    The pre-scale multiplies gradients before rounding; the mean is divided by it. It starts at 1,
    where the largest magnitude of a block fits. It grows by `GROWTH` in each step, up to 2, and is
    halved after a step in which more than `SATURATED` of the values saturated. It is the same on
    all processes.

    Args:
        process_group: None is the default group.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self.process_group = process_group
        self.pre_scale = 1.0
        self._counts: Tensor | None = None  # [saturated, all] of this step

    def update(self) -> None:
        """Adapts the pre-scale after a step; called by `all_reduce_hook`."""
        if self._counts is None:
            return
        saturated, seen = self._counts.tolist()
        self._counts = None
        if saturated > SATURATED * seen:
            self.pre_scale /= 2
        else:
            self.pre_scale = min(self.pre_scale * GROWTH, LARGEST)

    def count(self, counts: Tensor) -> None:
        """Adds [saturated, all] of a bucket, int64 (2,), to the counts of the step."""
        self._counts = counts if self._counts is None else self._counts + counts

    def state_dict(self) -> dict[str, float]:
        """The pre-scale of the next step, for a checkpoint between steps."""
        self.update()
        return {"pre_scale": self.pre_scale}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restores a `state_dict`."""
        self.pre_scale, self._counts = float(state["pre_scale"]), None


def all_reduce_hook(
    state: HookState,
    bucket: dist.GradBucket,  # type: ignore[name-defined, unused-ignore]
) -> torch.futures.Future[Tensor]:
    """The mean of a bucket of gradients over all processes, sent in FP8 and summed in float32.

    Use it as ``model.register_comm_hook(HookState(), all_reduce_hook)`` on a
    `DistributedDataParallel`.

    Each process sends every other process its part of the bucket, adds what it receives to its own
    unrounded part, and sends the mean to all. So each process rounds an element once. For gradients
    g on w processes, the error of an element is at most ``2**-4 * sum(abs(g)) / w``, that of one
    e4m3 rounding (2**-4) on each process: 1/33 of each contribution and 1/33 of the mean. For an
    element that is small compared to the largest in its block on any process, it is at most 2**-8
    of that one. Values that saturate, when the pre-scale is above 1 and magnitudes jump, have a
    larger error for one step. Inf or NaN makes all elements of the block Inf or NaN, on every
    process.

    Each process sends 0.26 of the bytes of a ring all-reduce in float32. Buckets are padded to a
    multiple of 32 elements per process. A single process rounds and sends nothing.

    Args:
        state: the `HookState` of the model.
        bucket: gradients of any floating-point dtype.

    Returns:
        A future of the mean, in the dtype of the bucket, the same on all processes.
    """
    if bucket.index() == 0:
        state.update()
    gradients = bucket.buffer()
    if dist.get_world_size(state.process_group) > 1:
        gradients.copy_(_mean(state, gradients.detach()))
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(gradients)
    return done


def _mean(state: HookState, gradients: Tensor) -> Tensor:
    """The mean of ``gradients`` (n,) over the processes: float32 (n,)."""
    group = state.process_group
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    size = gradients.numel()
    parts = F.pad(gradients.float(), (0, -size % (world * BLOCK))).view(world, -1, BLOCK)
    exponents = _exponents(parts)
    dist.all_reduce(exponents, dist.ReduceOp.MAX, group)
    scale = (exponents.to(torch.int32) << 23).view(torch.float32)

    scaled = parts * (state.pre_scale / scale)
    sent = _encode(scaled)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    contributions = _decode(received)
    contributions[rank] = scaled[rank]

    mean = _encode(contributions.mean(0)).flatten()
    packet = torch.cat([mean, _counts(scaled).view(torch.uint8)])
    packets = packet.new_empty(world, packet.numel())
    dist.all_gather(list(packets), packet, group=group)
    means, counts = packets.split([mean.numel(), 16], dim=1)
    state.count(counts.contiguous().view(torch.int64).sum(0))
    whole = _decode(means).view(parts.shape) * (scale / state.pre_scale)
    return whole.flatten()[:size]


def _exponents(blocks: Tensor) -> Tensor:
    """The E8M0 scale of each block (..., 32), the smallest that avoids overflow: uint8 (..., 1).
    255 is NaN, also used for Inf; a block of zeros has the smallest scale."""
    amax = blocks.abs().amax(-1, keepdim=True)
    exponents = RULES["up"](amax, GRADIENT_FORMAT).view(torch.int32) >> 23
    return torch.where(amax < torch.inf, exponents, _NONFINITE).to(torch.uint8)


def _counts(scaled: Tensor) -> Tensor:
    """[saturating values, all values]: int64 (2,)."""
    beyond = GRADIENT_FORMAT.max + 0.5  # half a step, which is 1, above the largest value
    saturated = (scaled.abs() >= beyond).sum()
    return torch.stack([saturated, torch.full_like(saturated, scaled.numel())])


# The bits of e3m4 are bits of the float16 of a value 2**-12 as large, whose exponent is 12 less.
_SMALLER = 2.0**-12


def _encode(x: Tensor) -> Tensor:
    """float32 rounded to `GRADIENT_FORMAT`, as codes: uint8."""
    half = (quantize(x, GRADIENT_FORMAT) * _SMALLER).half().view(torch.int16)
    return ((half >> 8 & 0x80) | (half >> 6 & 0x7F)).to(torch.uint8)


def _decode(bits: Tensor) -> Tensor:
    """The float32 values of the codes that `_encode` returns."""
    wide = bits.to(torch.int16)
    half = ((wide & 0x80) << 8 | (wide & 0x7F) << 6).view(torch.float16)
    return half.float() / _SMALLER
