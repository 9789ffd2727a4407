"""Random operands, different ones for different shapes."""

import torch


def normal(*shape, dtype=torch.float32, seed=0):
    """Standard normal numbers."""
    generator = torch.Generator().manual_seed(seed + 31 * len(shape) + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def randn(*shape, dtype=torch.float32, seed=0):
    """`normal`, as a leaf of autograd."""
    return normal(*shape, dtype=dtype, seed=seed).requires_grad_()
