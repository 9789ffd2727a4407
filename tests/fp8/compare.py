"""What a call computes: its result and gradients."""

import torch


def outcome(call, leaves, grad=None):
    """The result of ``call()`` and the gradients of ``leaves``, of ``grad`` (None: of the sum of
    squares of the result)."""
    y = call()
    wide = torch.promote_types(y.dtype, torch.float32)
    end = y.to(wide).square().sum() if grad is None else y
    return [
        y.detach(),
        *torch.autograd.grad(end, list(leaves), grad, retain_graph=True),
    ]
