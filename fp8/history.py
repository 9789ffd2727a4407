"""What delayed scaling remembers: the largest magnitudes of each operand in the last passes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["AmaxHistory"]


class AmaxHistory:
    """The state of a recipe with scaling "delayed": for each operand of each product its last
    largest magnitudes, newest first.

        history = fp8.AmaxHistory()
        for batch in batches:
            with fp8.autocast("delayed", history=history):
                loss = model(batch)
            loss.backward()

    One object belongs to one block that is opened once for each pass: the products are numbered in
    the order in which they are called, which must be the same in every pass, as far as it goes. A
    pass in which gradients are recorded adds one entry for each operand (a backward pass for the
    gradient), so under gradient accumulation every micro-batch counts as a pass; other passes only
    read. Until there is an entry an operand is scaled by its own largest magnitude; zero, Inf and
    NaN are not remembered. The first pass creates the entries and cannot be compiled; afterwards a
    function that contains the block can be.
    Each process of a data-parallel run has its own: `reduce` makes them equal.

    tensors: name of the operand, as "001.linear.weight", -> float32 (history,).
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def tensor(self, name: str, length: int, device: torch.device) -> Tensor:
        """The history of that operand, made of zeros where it is new.

        Raises ValueError where it is of another length, RuntimeError where a compiler asks for a
        new one.
        """
        if name not in self.tensors:
            if torch.compiler.is_compiling():
                raise RuntimeError(
                    f"there is no history of {name} yet: run the first pass in eager mode"
                )
            with torch.inference_mode(False):
                self.tensors[name] = torch.zeros(length, device=device)
        known = self.tensors[name]
        if known.shape != (length,):
            raise ValueError(
                f"the history of {name} has {known.shape[0]} entries, the recipe {length}"
            )
        return known

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of the tensors, for a checkpoint."""
        return {name: tensor.clone() for name, tensor in self.tensors.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes the place of what is remembered; in place where shapes agree, so that compiled code
        goes on. Raises TypeError for what is not a dict of float32 tensors."""
        for name, tensor in state.items():
            if not (isinstance(tensor, Tensor) and tensor.dtype == torch.float32):
                raise TypeError(f"the history of {name} is no float32 tensor: {tensor!r}")
        for name in set(self.tensors) - set(state):
            del self.tensors[name]
        for name, tensor in state.items():
            known = self.tensors.get(name)
            if known is not None and known.shape == tensor.shape:
                known.copy_(tensor)
            else:
                self.tensors[name] = tensor.detach().clone()

    def reduce(self, group: torch.distributed.ProcessGroup | None = None) -> None:
        """The largest entry over the processes of ``group`` (all) for every entry: one all-reduce,
        to be called after the backward pass, by all with the same products."""
        if not self.tensors:
            return
        names = sorted(self.tensors)
        flat = torch.cat([self.tensors[name] for name in names])
        torch.distributed.all_reduce(flat, torch.distributed.ReduceOp.MAX, group)
        sizes = [self.tensors[name].numel() for name in names]
        for name, tensor in zip(names, flat.split(sizes), strict=True):
            self.tensors[name].copy_(tensor)
