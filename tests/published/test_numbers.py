"""The rows of docs/papers-numbers.md: numbers of papers against what is measured here."""

import functools
import itertools
from decimal import Decimal

import pytest

from docs.papers import NUMBERS
from tests.published import models, tensors
from tests.shared import pairs, parametrize

MEASURES = tensors.MEASURES | models.MEASURES


@functools.cache
def measure(key):
    return MEASURES[key]()


def half_digits(numbers):
    """Half of the last printed digit of each."""
    return [
        0.5 * 10.0 ** int(Decimal(number).as_tuple().exponent) for number in numbers
    ]


def is_near(values, numbers, errors):
    """Whether each value is that number within half of its last digit and five standard errors."""
    return all(
        abs(value - float(number)) <= half + 5 * error
        for value, number, half, error in pairs(
            values, numbers, half_digits(numbers), errors
        )
    )


def is_in_order(found, published):
    """Whether all pairs that differ by 10 % in the publication have its order, by five standard
    errors."""
    return all(
        found.values[b] - found.values[a]
        > 5 * (found.errors[a] ** 2 + found.errors[b] ** 2) ** 0.5
        for a, b in itertools.permutations(range(len(published)), 2)
        if published[b] > 1.1 * published[a]
    )


def test_every_number_is_measured():
    assert sorted(MEASURES) == sorted(NUMBERS)


@parametrize("key", NUMBERS)
def test_ours(key):
    found = measure(key)
    assert is_near(found.values, NUMBERS[key].ours, found.errors), found


def misses(reason):
    mark = pytest.mark.xfail(strict=True, raises=AssertionError, reason=reason)
    return [mark] if reason else []


ROWS = [pytest.param(key, marks=misses(row.miss)) for key, row in NUMBERS.items()]


@parametrize("key", ROWS)
def test_theirs(key):
    row, found = NUMBERS[key], measure(key)
    published = [float(number) for number in row.theirs]
    if row.compare == "value":
        errors = [
            (a * a + b * b) ** 0.5
            for a, b in pairs(found.errors, found.published_errors)
        ]
        assert is_near(found.values, row.theirs, errors), found
    elif row.compare == "order":
        assert is_in_order(found, published), found
    else:
        low, high = found.values
        assert low < published[0] < high, found
