"""Halves of a sequence, against slices of the whole sequence."""

from fp8.casts.counts import WATCHED, Halves


def test_means_are_those_of_slices():
    """Exact, as the squares are integers."""
    values, halves = [n * n for n in range(5000)], Halves()
    for count, value in enumerate(values, 1):
        means, half = halves.add(value), count // 2
        if count >= WATCHED and count.bit_count() == 1:
            assert means == (sum(values[:half]) / half, sum(values[half:count]) / half)
        else:
            assert means is None
