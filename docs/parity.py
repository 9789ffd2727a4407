"""docs/parity.md: what other systems describe, and the test that proves it here.

The tests are read, not imported.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from docs.build import table
from docs.features import DOCUMENTS, FEATURES, HOW, Feature

ROOT = Path(__file__).parents[1]
PARITY = Path(__file__).with_name("parity.md")

PREAMBLE = """\
# Parity

Written by `make docs`: what the documents of seven systems describe, and the tests that show it
here: by running the real library, by code that is bound to its published signatures, or by an
implementation of our own that nothing of it is needed for. Files are those of `tests/`."""


@dataclass(frozen=True)
class Proof:
    """A mark of a test. ``test``: its file, and its name in it."""

    system: str
    feature: str
    how: str
    test: str


def proofs(folder: Path = ROOT / "tests") -> Iterator[Proof]:
    """The marks ``proves`` of all tests. ValueError for one that is not written as a literal."""
    for path in sorted(folder.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                test = f"{path.relative_to(folder.parent).as_posix()}::{node.name}"
                yield from (_proof(mark, test) for mark in node.decorator_list if _proves(mark))


def _proves(mark: ast.expr) -> bool:
    return isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.proves"


def _proof(mark: ast.expr, test: str) -> Proof:
    assert isinstance(mark, ast.Call)
    try:
        system, feature = map(ast.literal_eval, mark.args)
        options = {keyword.arg: ast.literal_eval(keyword.value) for keyword in mark.keywords}
        return Proof(system, feature, options["how"], test)
    except (KeyError, ValueError) as error:
        raise ValueError(f"{test}: the mark is proves(system, feature, how=...)") from error


def line(feature: Feature, found: list[Proof]) -> list[str]:
    """The cells of a feature."""
    key = (feature.system, feature.name)
    mine = [proof for proof in found if (proof.system, proof.feature) == key]
    tests = [f"`{proof.test.removeprefix('tests/')}`: {HOW[proof.how]}" for proof in mine]
    return [feature.name, feature.where, "<br>".join(tests) or "none", feature.note]


def render() -> str:
    """The text of docs/parity.md."""
    found = list(proofs())
    parts = [PREAMBLE]
    for system, (document, run) in DOCUMENTS.items():
        rows = [line(feature, found) for feature in FEATURES if feature.system == system]
        lines = table("feature | section | tests | remarks", rows)
        parts.append(f"## {system}\n\n{document}. {run}\n\n{lines}")
    return "\n\n".join(parts) + "\n"
