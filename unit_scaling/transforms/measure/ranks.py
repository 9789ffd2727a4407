"""What the processes of a job measure, made the same in all of them.

Each process measures on its own part of the data, and gradients that are averaged over processes
must have one gauge. The first process that has measured writes what it found into the store of the
default process group; the others take it from there. None waits for another one: that would be a
deadlock where processes run different models, as the stages of a pipeline do.
"""

from __future__ import annotations

import hashlib
from collections import Counter

from torch import distributed
from torch.distributed import distributed_c10d

__all__ = ["agreed", "fingerprint", "is_alone"]

_TIMES: Counter[str] = Counter()
"""How often this process has asked for each name."""


def fingerprint(*parts: object) -> str:
    """A name that is the same in all processes with equal parts."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def is_alone() -> bool:
    """Whether this is the only process of its job."""
    started = distributed.is_available() and distributed.is_initialized()
    return not started or distributed.get_world_size() == 1


def agreed(name: str, value: str) -> str:
    """``value``, or that of the process that has been first to ask for ``name`` as often."""
    if is_alone():
        return value
    _TIMES[name] += 1
    store = distributed_c10d._get_default_store()  # the public ones have to be made anew
    found: bytes = store.compare_set(f"unit_scaling/{name}/{_TIMES[name]}", "", value)
    return found.decode()
