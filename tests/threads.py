"""Running calls in several threads, for tests."""

import sys
import threading
from contextlib import contextmanager

from torch import nn

TIMEOUT = 20
"""Seconds after which a thread that waits for the others gives up."""

_BARRIERS = []


class Meet(nn.Module):
    """The identity, in which threads wait for each other inside of `meeting`."""

    def forward(self, x):
        for barrier in _BARRIERS:
            barrier.wait(TIMEOUT)
        return x


@contextmanager
def meeting(threads):
    """Within the block each `Meet` waits until so many threads are in one."""
    _BARRIERS.append(threading.Barrier(threads))
    try:
        yield
    finally:
        _BARRIERS.pop()


@contextmanager
def switching():
    """Within the block Python changes threads as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def together(*calls):
    """The results of the calls, each in a thread of its own, all begun at once. Raises the first of
    their errors."""
    start, results, errors = threading.Barrier(len(calls)), {}, []

    def run(i, call):
        try:
            start.wait(TIMEOUT)
            results[i] = call()
        except BaseException as error:
            errors.append(error)
            for barrier in _BARRIERS:
                barrier.abort()

    threads = [
        threading.Thread(target=run, args=item, daemon=True)
        for item in enumerate(calls)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * TIMEOUT)
    assert not any(thread.is_alive() for thread in threads), (
        "the threads wait for each other"
    )
    if errors:
        raise errors[0]
    return [results[i] for i in range(len(calls))]
