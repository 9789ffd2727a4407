"""DDP communication hook that averages gradients over processes in one byte per element.

Each element is rounded twice, as a contribution and as the mean: two roundings of e3m4 have the
error of one of e4m3. The missing range is in the scale of each `BLOCK` elements.
"""

# No annotations from __future__: DDP compares the annotations of its hook with types.

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from ..formats.format import Format
from ..formats.quantize import quantize
from ..recipes.rules import E8M0, LOWERED, SMALLEST

__all__ = ["BLOCK", "GRADIENT_FORMAT", "all_reduce_hook"]

BLOCK = 32
"""Elements of a bucket that share a scale, as in OCP MX; the scales are E8M0."""

GRADIENT_FORMAT = Format(
    name="e3m4",
    exponent_bits=3,
    mantissa_bits=4,
    bias=3,
    max=31.0,
    infinity=False,
    nan=False,
)
"""The format that is sent: 256 finite values, normal from 2**-2. Scales encode Inf and NaN."""


def all_reduce_hook(
    state: dist.ProcessGroup | None,
    bucket: dist.GradBucket,  # type: ignore[name-defined, unused-ignore]
) -> torch.futures.Future[Tensor]:
    """The mean of a bucket of gradients over all processes, sent in FP8 and summed in float32:
    ``model.register_comm_hook(None, all_reduce_hook)`` of a `DistributedDataParallel`.

    For gradients g on w processes, the error of an element is at most ``2**-4 * sum(abs(g)) / w``,
    the error of one e4m3 rounding on each process. For an element that is small compared to the
    largest in its block on any process, it is at most 2**-8 of the largest. Inf or NaN makes all
    elements of the block Inf or NaN, on every process. A single process rounds nothing.

    Args:
        state: the process group; None is the default group.
        bucket: gradients of any floating-point dtype.

    Returns:
        A future of the mean, in the dtype of the bucket, the same on all processes.
    """
    gradients = bucket.buffer()
    if dist.get_world_size(state) > 1:
        gradients.copy_(_mean(gradients.detach(), state))
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(gradients)
    return done


def _mean(gradients: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    size = gradients.numel()
    parts = F.pad(gradients.float(), (0, -size % (world * BLOCK))).view(
        world, -1, BLOCK
    )
    exponents = _scales(parts).view(torch.uint8)  # NaN has the largest exponent
    dist.all_reduce(exponents, dist.ReduceOp.MAX, group)
    scale = exponents.view(torch.float8_e8m0fnu).float()

    scaled = parts / scale
    sent = _encode(scaled)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    contributions = _decode(received)
    contributions[rank] = scaled[rank]

    mean = _encode(contributions.mean(0)).flatten()
    means = mean.new_empty(world, mean.numel())
    dist.all_gather(list(means), mean, group=group)
    whole = _decode(means).view(parts.shape) * scale
    return whole.flatten()[:size]


def _scales(blocks: Tensor) -> Tensor:
    """The smallest E8M0 scale without overflow of each block (..., 32); NaN for NaN or Inf."""
    amax = blocks.abs().amax(-1, keepdim=True)
    # Zeros have the smallest scale, so that the scales of other processes are kept.
    scale = LOWERED["up" + E8M0].scale_of(
        amax.clamp(min=2.0**SMALLEST), GRADIENT_FORMAT
    )
    scale = torch.where(amax < torch.inf, scale, torch.nan)
    return scale.to(torch.float8_e8m0fnu)


# The bits of e3m4 are bits of the float16 of a value 2**-12 as large, whose exponent is 12 less.
_SMALLER = 2.0**-12


def _encode(x: Tensor) -> Tensor:
    """float32 rounded to `GRADIENT_FORMAT`, as codes: uint8."""
    half = (quantize(x, GRADIENT_FORMAT) * _SMALLER).half().view(torch.int16)
    return ((half >> 8 & 0x80) | (half >> 6 & 0x7F)).to(torch.uint8)


def _decode(bits: Tensor) -> Tensor:
    wide = bits.to(torch.int16)
    half = ((wide & 0x80) << 8 | (wide & 0x7F) << 6).view(torch.float16)
    return half.float() / _SMALLER
