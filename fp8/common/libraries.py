"""Optional libraries. Each is imported when it is first used, through one door: `need`."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
import warnings
from typing import Any, NamedTuple

__all__ = ["LIBRARIES", "Found", "Library", "need", "probe"]


class Library(NamedTuple):
    """A row of LIBRARIES."""

    module: str
    """What is imported."""
    distribution: str
    """What its version is asked of."""
    get: str
    """How to install it."""


def _extra(name: str) -> str:
    return f"pip install 'unit-scaling-fp8[{name}]'"


LIBRARIES: dict[str, Library] = {
    # The part for torch is compiled when it is installed, against the torch that is there.
    "transformer_engine": Library(
        "transformer_engine.pytorch",
        "transformer_engine",
        "pip install --no-build-isolation 'unit-scaling-fp8[te]', on Linux, with CUDA's nvcc",
    ),
    "msamp": Library(
        "msamp",
        "msamp",
        "no distribution: build https://github.com/Azure/MS-AMP, for torch 2.1; "
        "fp8.initialize has its levels without it",
    ),
    "torchao": Library("torchao.float8", "torchao", _extra("torchao")),
    "bitsandbytes": Library("bitsandbytes", "bitsandbytes", _extra("bitsandbytes")),
    "accelerate": Library("accelerate", "accelerate", _extra("accelerate")),
    "lightning": Library("lightning", "lightning", _extra("lightning")),
    "transformers": Library("transformers", "transformers", _extra("transformers")),
    "composer": Library(  # with what mosaicml 0.32.1 was seen to run beside
        "composer",
        "mosaicml",
        f"uv {_extra('composer')} --override FILE, where FILE says torch==2.13.0 and "
        "torchvision==0.28.0: by itself mosaicml asks for torch below 2.7.1",
    ),
    "safetensors": Library("safetensors.torch", "safetensors", _extra("export")),
}
"""Name -> where a library is found and how it is installed."""


class Found(NamedTuple):
    """What importing a library led to. status: "found", "missing" or "broken"."""

    status: str
    version: str
    why: str
    module: Any
    error: Exception | None


def probe(name: str) -> Found:
    """Imports the library of that name in `LIBRARIES` and says what came of it. Raises nothing that
    the import does: a library that is there and fails is "broken", and ``why`` has its words."""
    library = LIBRARIES[name]
    try:
        with warnings.catch_warnings():  # what a library says of its own insides
            warnings.simplefilter("ignore")
            module = importlib.import_module(library.module)
    except Exception as error:
        top = library.module.partition(".")[0]
        if isinstance(error, ModuleNotFoundError) and error.name == top:
            return Found("missing", "", "not installed", None, error)
        lines = str(error).strip().splitlines() or [""]
        return Found("broken", _version(name), f"{type(error).__name__}: {lines[0]}", None, error)
    return Found("found", _version(name), "", module, None)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(LIBRARIES[name].distribution)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def need(name: str) -> Any:
    """The imported module of the library of that name in `LIBRARIES`.

    Raises ImportError, with the command that installs it, for one that is not there or that fails
    when it is imported, whatever it raises.
    """
    loaded = sys.modules.get(LIBRARIES[name].module)
    if loaded is not None:  # asked for in every pass of a model
        return loaded
    found = probe(name)
    if found.module is None:
        state = "is not installed" if found.status == "missing" else f"is broken ({found.why})"
        raise ImportError(f"{name} {state}: {LIBRARIES[name].get}") from found.error
    return found.module
