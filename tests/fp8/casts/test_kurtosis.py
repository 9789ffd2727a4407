"""Halves of a sequence in bounded memory, against slices of the whole sequence."""

import pickle

import pytest

from fp8.casts.counts import WATCHED, Halves


def halves_of(values):
    halves = Halves()
    for value in values:
        halves.add(value)
    return halves


@pytest.mark.parametrize("count", [*range(1, 300), 1023, 1024, 1025, 4096, 5000])
def test_means_are_those_of_slices(count):
    """Exact, as the squares are integers: of as many values as fill runs of one length."""
    values = [n * n for n in range(count)]
    run = 1
    while count // run >= 2 * WATCHED:
        run *= 2
    whole, half = count // run * run, count // run // 2 * run
    if count < WATCHED:
        assert halves_of(values).means() is None
        return
    first, second = values[:half], values[whole - half : whole]
    assert halves_of(values).means() == (sum(first) / half, sum(second) / half)
    assert half > count * (0.5 - 1 / WATCHED)


def test_memory_is_bounded():
    sizes = {count: len(pickle.dumps(halves_of([0.1] * count))) for count in (63, 10_000, 100_001)}
    assert max(sizes.values()) <= sizes[63] + 16  # the numbers of a larger run
