"""The place of a call in the code of a model.

A place identifies a call in training, evaluation and generation, at every length, in every pass of
a loop, and in eager code and in graphs alike: by the path of the running module, the kind of the
call, and the source lines of the functions between the module's forward and the call.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import CodeType, FrameType

import torch

# The frames of the code that torch.compile traces; torch has no public name for them.
from torch._guards import TracingContext

from fp8.common.compiler import taken_as_constant

from .. import install

Place = tuple[str, str, str]
"""(path of the module, kind of the call, source lines, outermost first)."""

TORCH = str(Path(torch.__file__).parent)
_MODULES = str(Path(torch.nn.modules.__file__).parent)
_MODULE = str(Path(torch.nn.modules.module.__file__))
_HOME = Path(__file__).parents[3]
PACKAGES = tuple(str(_HOME / name) for name in ("fp8", "unit_scaling"))
_CALLERS = tuple(str(_HOME / "fp8" / name) for name in ("products", "formats", "distributed"))


@cache
def _is_named(file: str) -> bool:
    """Whether a place includes the lines of a file: of the user's code, of torch's modules, and of
    the functions of this library that make calls of torch for another one."""
    if file.startswith(TORCH):
        return file.startswith(_MODULES) and file != _MODULE
    return not file.startswith(PACKAGES) or file.startswith(_CALLERS)


_SKIPPED, _NAMED, _FORWARD = range(3)

_ROLES: dict[int, tuple[CodeType, int]] = {}
"""Id of a code object -> the object, which stays alive, and its role: skipped, named, or the code
that calls the forward of a module."""


def lines_here() -> str:
    """The lines of the running call in eager code, from the innermost module's forward on."""
    frame: FrameType | None = sys._getframe(2)
    key: tuple[int, ...] = ()
    while frame is not None:
        code = frame.f_code
        role = _ROLES.get(id(code)) or _role(code)
        if role[1] == _FORWARD:
            break
        if role[1]:
            key += id(code), frame.f_lasti
        frame = frame.f_back
    return _lines_at(key)


def _role(code: CodeType) -> tuple[CodeType, int]:
    file = code.co_filename
    role = _FORWARD if file == install.__file__ else _NAMED if _is_named(file) else _SKIPPED
    return _ROLES.setdefault(id(code), (code, role))


@cache
def _lines_at(key: tuple[int, ...]) -> str:
    """key: for each frame, innermost first, the id of its code object and its instruction."""
    lines: list[tuple[str, int]] = []
    for code_id, at in zip(key[::2], key[1::2], strict=True):
        code, _ = _ROLES[code_id]
        line = next(line for start, end, line in code.co_lines() if start <= at < end)
        lines.append((code.co_filename, line or 0))
    return _joined(reversed(lines))


@taken_as_constant
def lines_in_graph() -> str:
    """The same in the code that torch.compile traces."""
    lines: list[tuple[str, int]] = []
    for frame in TracingContext.extract_stack():
        if frame.filename == install.__file__:
            lines.clear()
        elif _is_named(frame.filename):
            lines.append((frame.filename, frame.lineno or 0))
    return _joined(lines)


def _joined(lines: Iterable[tuple[str, int]]) -> str:
    return " > ".join(_text(file, line) for file, line in lines)


@cache
def _text(file: str, line: int) -> str:
    """The source of a line, which edits of other lines do not change, numbered if earlier lines of
    the file equal it."""
    lines = [each.strip() for each in linecache.getlines(file)[:line]]
    if len(lines) < line or not line:
        return f"{Path(file).name}:{line}"
    earlier = lines[:-1].count(lines[-1])
    return f"{lines[-1]} #{earlier + 1}" if earlier else lines[-1]
