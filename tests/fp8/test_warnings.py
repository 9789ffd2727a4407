"""Warnings that appear once for each object, and are errors under `fp8.strict`."""

import gc
import warnings
import weakref

import pytest
from torch import nn

import fp8
from fp8.warnings import warn_once


def test_it_is_shown_once_for_each_object_and_key():
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for model in (first, first, second):
            warn_once(fp8.warnings.ScaleWarning, "small", about=model)
        warn_once(fp8.warnings.ScaleWarning, "large", about=first, key="other")
        warn_once(fp8.warnings.RecipeWarning, "lossy", about=first)
    assert [str(w.message) for w in seen] == "small small large lossy".split()
    assert all(issubclass(w.category, fp8.PitfallWarning) for w in seen)


def test_it_holds_no_object():
    model = nn.Linear(2, 2)
    with pytest.warns(fp8.warnings.ScaleWarning):
        warn_once(fp8.warnings.ScaleWarning, "small", about=model)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def test_strict_raises_each_time_and_ends_with_its_block():
    model = nn.Linear(2, 2)
    with fp8.strict():
        for _ in range(2):
            with pytest.raises(fp8.warnings.ScaleWarning, match="small"):
                warn_once(fp8.warnings.ScaleWarning, "small", about=model)
        with fp8.strict(False), pytest.warns(fp8.warnings.ScaleWarning):
            warn_once(fp8.warnings.ScaleWarning, "small", about=model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_once(fp8.warnings.ScaleWarning, "small", about=model)  # shown before
    fp8.strict()  # without a block it stays
    try:
        with pytest.raises(fp8.warnings.RecipeWarning):
            warn_once(fp8.warnings.RecipeWarning, "lossy")
    finally:
        fp8.strict(False)
