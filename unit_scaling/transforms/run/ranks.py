"""Makes the measurements of all processes of a job equal.

Each process measures on its own data, but gradients averaged over processes need one function. The
first process to finish writes its measurements to the store of the default process group; the
others read them. No process waits for another: that would deadlock where processes run different
models, such as pipeline stages.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from typing import Any, TypeVar

from torch import distributed
from torch.distributed import distributed_c10d

K = TypeVar("K")

_TIMES: Counter[str] = Counter()
"""How often this process has requested each name."""


def fingerprint(*parts: object) -> str:
    """A hash that is the same in all processes with equal parts."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def numbered(name: str) -> str:
    """``name`` and how often this process has asked for it: all processes ask in the same order."""
    _TIMES[name] += 1
    return f"{name} {_TIMES[name]}"


def is_alone() -> bool:
    """Whether this is the only process of its job."""
    started = distributed.is_available() and distributed.is_initialized()
    return not started or distributed.get_world_size() == 1


def agreed(name: str, value: str) -> str:
    """``value``, or that of the first process to make the same-numbered request for ``name``."""
    if is_alone():
        return value
    store = distributed_c10d._get_default_store()  # public stores must be created anew
    found: bytes = store.compare_set(f"unit_scaling/{numbered(name)}", "", value)
    return found.decode()


_TABLES: dict[str, dict[str, Any]] = {}
"""The values that `agreed_once` has returned, by name."""


def agreed_once(name: str, values: Mapping[K, Any]) -> dict[K, Any]:
    """``values``, or for each of them that of the first process to name it. They never change.

    values: numbers, text and lists of these. Processes may name others at other times, as with
    experts that only some of them have used.
    """
    if is_alone():
        return dict(values)
    own = {str(key): value for key, value in values.items()}
    if name not in _TABLES:
        _TABLES[name] = json.loads(agreed(name, json.dumps(own)))
    known = _TABLES[name]
    for text, value in own.items():
        if text not in known:
            known[text] = json.loads(agreed(f"{name}/{text}", json.dumps(value)))
    return {key: known[str(key)] for key in values}
