"""Makes the measurements of all processes of a job equal: gradients averaged over processes need
one function.

The first process to finish writes its measurements to the store of the default process group; the
others read them. None waits: that would deadlock with pipeline stages.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from torch.distributed import distributed_c10d

from fp8.common.ranks import ranks

from ...common.calls import T

_TIMES: Counter[str] = Counter()
"""How often this process has named a model of the same parameters."""

_VALUES: dict[str, Any] = {}
"""The values that `agreed` has returned."""


def model_name(parameters: Iterable[str]) -> str:
    """A name that is the same in all processes, which name their models in the same order."""
    name = hashlib.sha256(repr(sorted(parameters)).encode()).hexdigest()[:32]
    _TIMES[name] += 1
    return f"{name} {_TIMES[name]}"


def agreed(name: str, values: Mapping[str, T]) -> dict[str, T]:
    """``values``, or for each of them that of the first process to name it. They never change.
    values: numbers, text and lists of these; others at other times, as with unused experts."""
    if ranks() == 1:
        return dict(values)
    # No collective: with pipeline stages, not every process runs this part of the model.
    store = distributed_c10d._get_default_store()  # public stores must be created anew
    result = {}
    for key, value in values.items():
        text = f"unit_scaling/{name}/{key}"
        if text not in _VALUES:
            first = store.compare_set(text, "", json.dumps(value))
            _VALUES[text] = json.loads(first.decode())
        result[key] = _VALUES[text]
    return result
