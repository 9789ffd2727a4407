"""Optional libraries, imported on first use by `need`."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import sys
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

from ..torch_internals import TorchFunction

F = TypeVar("F", bound=TorchFunction)

__all__ = ["LIBRARIES", "TRANSFORMS", "Found", "Library", "need", "probe", "transforms"]


class Library(NamedTuple):
    """A row of LIBRARIES. module: the module to import. distribution: its name in a registry. get:
    how to install it."""

    module: str
    distribution: str
    get: str


def _extra(name: str) -> str:
    return f"pip install 'unit-scaling-fp8[{name}]'"


LIBRARIES: dict[str, Library] = {
    # The PyTorch extension is compiled at installation, against the installed torch.
    "transformer_engine": Library(
        "transformer_engine.pytorch",
        "transformer_engine",
        "pip install --no-build-isolation 'unit-scaling-fp8[te]', on Linux, with CUDA's nvcc",
    ),
    "torchao": Library("torchao.float8", "torchao", _extra("torchao")),
    # No distribution of it is published, and its latest version does not import with torch 2.11.
    "msamp": Library(
        "msamp",
        "MS-AMP",
        "from github.com/Azure/MS-AMP, with torch 2.1, DeepSpeed and its NCCL",
    ),
    "bitsandbytes": Library("bitsandbytes", "bitsandbytes", _extra("bitsandbytes")),
    "accelerate": Library("accelerate", "accelerate", _extra("accelerate")),
    "lightning": Library("lightning", "lightning", _extra("lightning")),
    "transformers": Library("transformers", "transformers", _extra("transformers")),
    "composer": Library(  # versions that mosaicml 0.32.1 was tested with
        "composer",
        "mosaicml",
        f"uv {_extra('composer')} --override FILE, where FILE says torch==2.13.0 and "
        "torchvision==0.28.0: by itself mosaicml asks for torch below 2.7.1",
    ),
    "torchtitan": Library("torchtitan", "torchtitan", "pip install torchtitan triton"),
    "safetensors": Library("safetensors.torch", "safetensors", _extra("export")),
    "jinja2": Library("jinja2", "jinja2", _extra("preflight")),
    "matplotlib": Library("matplotlib", "matplotlib", _extra("plot")),
}
"""Name -> module, distribution and installation command of an optional library."""

TAKES = {
    "transformer_engine": "convert(model, recipe)",
    "torchao": "convert(model, config)",
    "accelerate": "prepare(accelerator, model, recipe=...)",
}
"""A library of LIBRARIES -> the function of its adapter that takes its recipe objects."""

ARGUMENTS = {
    "config": "torchao.convert(model, config)",
    "module_filter_fn": "torchao.convert(model, config, where=lambda name, layer: f(layer, name))",
    "use_te": "msamp.initialize(model, optimizer, opt_level, use_te)",
}
"""An argument of another library's function -> the function of `fp8.adapters` in its place."""

#: The group of entry points of transforms: functions of a model that return one that trains with
#: the same optimizer. `unit_scaling` registers one. Attributes of the function: ``recipe`` is the
#: recipe to train it with; ``label``, if there is one, the name that reports show; ``optimizer``,
#: if there is one, a function (model, optimizer) -> the optimizer that the transformed model needs
#: in place of that one.
TRANSFORMS = "fp8.transforms"


class Found(NamedTuple):
    """The result of an import. status: "found", "missing" or "broken"."""

    status: str
    version: str
    why: str
    module: Any
    error: Exception | None


def probe(name: str) -> Found:
    """Imports the library ``name`` of `LIBRARIES` and returns the result.

    An import that raises does not propagate: the status is "broken" and ``why`` holds the message.
    """
    library = LIBRARIES[name]
    try:
        with warnings.catch_warnings():  # a library's warnings about its own internals
            warnings.simplefilter("ignore")
            module = importlib.import_module(library.module)
    except Exception as error:  # also of compiled parts, which raise errors of any kind
        top = library.module.partition(".")[0]
        if isinstance(error, ModuleNotFoundError) and error.name == top:
            return Found("missing", "", "not installed", None, error)
        lines = str(error).strip().splitlines() or [""]
        return Found(
            "broken",
            _version(name),
            f"{type(error).__name__}: {lines[0]}",
            None,
            error,
        )
    return Found("found", _version(name), "", module, None)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(LIBRARIES[name].distribution)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def need(name: str) -> Any:
    """The imported module of the library ``name`` of `LIBRARIES`.

    Raises ImportError, with the installation command, if the library is missing or if importing it
    raises anything.
    """
    loaded = sys.modules.get(LIBRARIES[name].module)
    if loaded is not None:  # `need` runs in every pass of a model
        return loaded
    result = probe(name)
    if result.module is None:
        state = "is not installed"
        if result.status == "broken":
            state = f"is broken ({result.why})"
        raise ImportError(f"{name} {state}: {LIBRARIES[name].get}") from result.error
    return result.module


def who_takes(recipe: object) -> str:
    """The adapter that takes ``recipe``, an object of a library in `TAKES` or of a subclass of its
    classes, as the end of a message; "" for other objects."""
    tops = {kind.__module__.partition(".")[0] for kind in type(recipe).__mro__}
    for name, function in TAKES.items():
        if LIBRARIES[name].module.partition(".")[0] in tops:
            return f"; fp8.adapters.{name}.{function} takes it"
    return ""


def explains_arguments(function: F) -> F:
    """Decorator: an argument in `ARGUMENTS` raises a TypeError that names what takes it."""

    @functools.wraps(function)
    def explained(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs:
            if name in ARGUMENTS:
                instead = f"use fp8.adapters.{ARGUMENTS[name]}"
                raise TypeError(f"fp8.{function.__name__} has no {name}=; {instead}")
        return function(*args, **kwargs)

    return cast("F", explained)


def transforms() -> dict[str, Callable[[Any], Any]]:
    """The transforms of installed packages, the entry points of the group `TRANSFORMS`, by name."""
    entries = importlib.metadata.entry_points(group=TRANSFORMS)
    return {entry.name: entry.load() for entry in entries}
