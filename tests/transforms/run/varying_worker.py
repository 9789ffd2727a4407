"""One of two processes of test_varying: ``python varying_worker.py RANK STORE``.

Each routes batches of its own to experts that the other may not have used.
"""

from __future__ import annotations

import copy
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.launch import as_rank
from tests.transforms.run.test_varying import Experts, Stacked, batches, made
from unit_scaling.transforms import unit_scale
from unit_scaling.transforms.run.install import find_scope
from unit_scaling.transforms.run.scope import UnitScale


def trained(model: nn.Module, given: list[Tensor]) -> dict[str, Tensor]:
    """The gradients of parameters, averaged over processes and summed over batches."""
    parallel = DistributedDataParallel(model, find_unused_parameters=True)
    for x in given:
        parallel(x).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def exponents(model: nn.Module) -> dict[str, int]:
    """The powers of two of the gradients of parameters."""
    scope = find_scope(model, UnitScale)
    assert scope is not None
    scope.settle()
    (plan,) = scope.plans.values()
    assert plan.outside in (None, 0) or not plan.final
    return {name: exponent + (plan.outside or 0) for name, exponent in plan.parameters.items()}


def main(rank: int, _: Path) -> None:
    given = batches(16)[rank::2]
    for kind in (Experts, Stacked):
        plain = made(kind)
        expected = trained(copy.deepcopy(plain), given)
        found = trained(unit_scale(copy.deepcopy(plain), init="preserve"), given)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
        model = unit_scale(plain)
        trained(model, given)
        both: list[dict[str, int]] = [{}, {}]
        dist.all_gather_object(both, exponents(model))
        common = both[0].keys() & both[1].keys()
        assert len(common) > len(both[0]) / 2
        assert {n: both[0][n] for n in common} == {n: both[1][n] for n in common}
        values: list[list[float]] = [[], []]
        dist.all_gather_object(values, [model(x).item() for x in batches(4)])
        assert values[0] == values[1]


if __name__ == "__main__":
    as_rank(main, 2)
