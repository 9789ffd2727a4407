"""Progress of a study on stderr: a bar of tqdm with the time left, or a line per stage without
it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec


class Progress:
    """Shows the stages of a study. show: False shows nothing."""

    def __init__(self, *, show: bool) -> None:
        self.show = show

    @contextmanager
    def stage(self, name: str, total: int) -> Iterator[Callable[[], None]]:
        """Within the block a bar of ``total`` ticks; yields the function that makes one."""
        if not self.show:
            yield lambda: None
        elif find_spec("tqdm") is None:
            print(f"{name} ...", file=sys.stderr, flush=True)
            yield lambda: None
        else:
            from tqdm import tqdm

            with tqdm(total=total, desc=name, leave=False, dynamic_ncols=True) as bar:
                yield lambda: bar.update() and None
