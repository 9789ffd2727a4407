"""Random operands, different ones for different shapes."""

import torch
from torch import Tensor


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Standard normal numbers."""
    generator = torch.Generator().manual_seed(seed + 31 * len(shape) + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """`normal`, as a leaf of autograd."""
    return normal(*shape, dtype=dtype, seed=seed).requires_grad_()
