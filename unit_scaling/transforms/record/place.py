"""The place of a call in the code of a model.

A place names a call in every form of a call of the model (training, evaluation, other lengths), in
every iteration of a loop, and in eager code and in graphs alike: by the path of the running module,
the kind of the call, and the lines of the functions between the module's forward and the call.
"""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import torch

# The frames of the code that torch.compile traces; torch has no public name for them.
from torch._guards import TracingContext

from fp8.common.compiler import taken_as_constant

from .. import install

Place = tuple[str, str, str]
"""(path of the module, kind of the call, lines). A line is named by its function."""

_TORCH = str(Path(torch.__file__).parent)
_MODULES = str(Path(torch.nn.modules.__file__).parent)
_MODULE = str(Path(torch.nn.modules.module.__file__))
_HOME = Path(__file__).parents[3]
_PACKAGES = tuple(str(_HOME / name) for name in ("fp8", "unit_scaling"))
_CALLERS = tuple(str(_HOME / "fp8" / name) for name in ("products", "formats", "distributed"))


def _is_named(file: str) -> bool:
    """Whether a place names the lines of a file: of the user's code, of torch's modules, and of the
    calls that this library composes one of torch of, or makes in hooks."""
    if file.startswith(_TORCH):
        return file.startswith(_MODULES) and file != _MODULE
    return not file.startswith(_PACKAGES) or file.startswith(_CALLERS)


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
    return " ".join(_name(file, line or 0) for file, line in places)


def _name(file: str, line: int) -> str:
    """A line by the function that it is in and its offset from the first line of this, which stay
    where other code of the file changes."""
    functions = [each for each in _functions(file) if each.first <= line <= each.last]
    if not functions:
        return f"{Path(file).name}:{line}"
    inner = max(functions, key=lambda each: each.first)
    return f"{inner.name}+{line - inner.first}"


class _Function(NamedTuple):
    name: str
    first: int
    last: int


@cache
def _functions(file: str) -> list[_Function]:
    """The functions of a file with their qualified names; [] without its source."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return []
    return list(_functions_in(tree, ""))


def _functions_in(node: ast.AST, prefix: str) -> Iterator[_Function]:
    for child in ast.iter_child_nodes(node):
        inner = prefix
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{prefix}{child.name}."
            if not isinstance(child, ast.ClassDef):
                yield _Function(inner[:-1], child.lineno, child.end_lineno or child.lineno)
        yield from _functions_in(child, inner)
