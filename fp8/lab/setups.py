"""Functions that return a setup, by the name that a command line gives them: "train.py:setup"."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from ..common.step import seeded, with_seed
from ..warnings import OWN


def from_function(name: str) -> Callable[..., Any]:
    """The function of "train.py:setup" or "package.module:setup". Raises ValueError for a text
    without a colon and for what does not exist, TypeError for what is not callable."""
    where, colon, function = name.rpartition(":")
    if not (colon and where and function):
        raise ValueError(f"give a file and a function, as train.py:setup, got {name!r}")
    setup = getattr(_module(where), function, None)
    if setup is None:
        raise ValueError(f"{where} has no {function!r}")
    if not callable(setup):
        raise TypeError(
            f"{name} is a {type(setup).__name__}, not a function that returns a setup"
        )
    return setup


def made_by(name: str) -> Sequence[Any]:
    """The model, its batches and what else the function of "train.py:setup" returns with seed 0.
    Raises as `from_function`, and ValueError for another result."""
    function = from_function(name)
    with seeded(0):
        made = with_seed(function, 0)
    if not isinstance(made, tuple | list) or len(made) < 2:
        raise ValueError(
            f"{name} must return (model, batches[, loss]), got {made!r:.80}"
        )
    return made


def place(error: BaseException) -> str:
    """What the user's code has raised and where; "" for an error of this package."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or frames[-1].filename.startswith(OWN):
        return ""
    return f" ({type(error).__name__} at {frames[-1].filename}:{frames[-1].lineno})"


def _module(where: str) -> ModuleType:
    if not where.endswith(".py"):
        try:
            return importlib.import_module(where)
        except ModuleNotFoundError as error:
            raise ValueError(f"no module {where!r}: {error}") from error
    path = Path(where).resolve()
    if not path.is_file():
        raise ValueError(f"no file {where!r}")
    # The modules beside the file are found, as by `python FILE.py`.
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # dataclasses and pickle look there
    spec.loader.exec_module(module)
    return module
