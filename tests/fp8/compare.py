"""What a call computes: its result and gradients, and what autograd keeps of it."""

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


def bytes_kept(run, *, beside=()):
    """Of the storages that autograd holds after ``run()``, each once, those of ``beside`` not."""
    held = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: held.append(t) or t, lambda t: t
    ):
        y = run()
    assert y.requires_grad
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
    there = {t.untyped_storage().data_ptr() for t in beside}
    return sum(size for pointer, size in sizes.items() if pointer not in there)
