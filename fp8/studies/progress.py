"""Progress of a study on stderr: a bar of tqdm with the time left, or a line per stage without
it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec


@contextmanager
def stage(name: str, total: int, *, show: bool) -> Iterator[Callable[[], None]]:
    """Within the block a bar of ``total`` ticks; yields the function that makes one. show: False
    shows nothing."""
    if not show:
        yield lambda: None
    elif find_spec("tqdm") is None:
        print(f"{name} ...", file=sys.stderr, flush=True)
        yield lambda: None
    else:
        from tqdm import tqdm

        with tqdm(total=total, desc=name, leave=False, dynamic_ncols=True) as bar:
            yield lambda: bar.update() and None
