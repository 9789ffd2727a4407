"""The place of a call in the code of a model.

A place names a call in every form of a call of the model (training, evaluation, other lengths), in
every iteration of a loop, and in eager code and in graphs alike: by the path of the running module,
the kind of the call, and the lines of the functions between the module's forward and the call.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from types import CodeType, FrameType

import torch

# The frames of the code that torch.compile traces; torch has no public name for them.
from torch._guards import TracingContext

from fp8.common.compiler import taken_as_constant

from ..run import install

Place = tuple[str, str, str]
"""(path of the module, kind of the call, lines)."""

_TORCH = str(Path(torch.__file__).parent)
_MODULES = str(Path(torch.nn.modules.__file__).parent)
_MODULE = str(Path(torch.nn.modules.module.__file__))
_PACKAGES = tuple(str(Path(__file__).parents[3] / name) for name in ("fp8", "unit_scaling"))
_PRODUCTS = str(Path(__file__).parents[3] / "fp8" / "products")


def _is_named(file: str) -> bool:
    """Whether a place names the lines of a file: of the user's code, of torch's modules, and of the
    calls that this library composes one of torch of."""
    if file.startswith(_TORCH):
        return file.startswith(_MODULES) and file != _MODULE
    return not file.startswith(_PACKAGES) or file.startswith(_PRODUCTS)


_LINES: dict[tuple[int, ...], str] = {}
"""(id of a code object, index of its instruction) of each frame -> the lines."""

_NAMED: dict[int, tuple[CodeType, bool]] = {}
"""Id of a code object -> the object, kept alive, and whether its lines are named."""


def lines_here() -> str:
    """The lines of the running call, from the innermost module's forward on."""
    if torch.compiler.is_dynamo_compiling():
        return _lines_in_graph()
    frame: FrameType | None = sys._getframe(1)
    key: list[int] = []
    chain: list[FrameType] = []
    while frame is not None:
        code = frame.f_code
        known = _NAMED.get(id(code))
        if known is None:
            known = _NAMED[id(code)] = code, _is_named(code.co_filename)
        if known[1]:
            key += id(code), frame.f_lasti
            chain.append(frame)
        elif code.co_filename == install.__file__:
            break
        frame = frame.f_back
    lines = _LINES.get(tuple(key))
    if lines is None:
        places = [(frame.f_code.co_filename, frame.f_lineno) for frame in reversed(chain)]
        lines = _LINES[tuple(key)] = _joined(places)
    return lines


@taken_as_constant
def _lines_in_graph() -> str:
    found: list[tuple[str, int | None]] = []
    for frame in TracingContext.extract_stack():
        if frame.filename == install.__file__:
            found.clear()
        elif _is_named(frame.filename):
            found.append((frame.filename, frame.lineno))
    return _joined(found)


def _joined(places: Iterable[tuple[str, int | None]]) -> str:
    return " ".join(f"{Path(file).name}:{line}" for file, line in places)
