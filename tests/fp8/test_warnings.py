"""Warnings that appear once for each object, and are errors under `fp8.strict`."""

import gc
import warnings
import weakref

import pytest
from torch import nn

import fp8
from fp8.warnings import ScaleWarning, warn_once
from tests.shared import said


def warn(model):
    warn_once(ScaleWarning, "small", about=model)


def test_it_is_shown_once_for_each_object_and_key():
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    with said(fp8.PitfallWarning) as seen:
        for model in (first, first, second):
            warn(model)
        warn_once(ScaleWarning, "large", about=first, key="other")
        warn_once(fp8.warnings.RecipeWarning, "lossy", about=first)
    assert seen == "small small large lossy".split()


def test_it_holds_no_object():
    model = nn.Linear(2, 2)
    with pytest.warns(ScaleWarning):
        warn(model)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def test_strict_raises_each_time_and_ends_with_its_block():
    model = nn.Linear(2, 2)
    with fp8.strict():
        for _ in range(2):
            with pytest.raises(ScaleWarning, match="small"):
                warn(model)
        with fp8.strict(False), pytest.warns(ScaleWarning):
            warn(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn(model)  # shown before
    fp8.strict()  # without a block it stays
    try:
        with pytest.raises(fp8.warnings.RecipeWarning):
            warn_once(fp8.warnings.RecipeWarning, "lossy")
    finally:
        fp8.strict(False)
