"""docs/parity.md: what other systems have or describe, and the test that proves it here.

The tests are read, not imported.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from docs.features import (
    COMPARISONS,
    DOCUMENTS,
    FEATURES,
    FIELD,
    HOW,
    PEERS,
    Comparison,
    Feature,
)
from docs.markdown import table

ROOT = Path(__file__).parents[1]
PARITY = Path(__file__).with_name("parity.md")

PREAMBLE = """\
# Parity

Written by `make docs`: what engines have, what the documents of seven systems describe, and the
tests that show it here: by running the real library, by code that is bound to its published
signatures, or by an implementation of our own, without the system's. Files are in `tests/`."""

ENGINES = """\
## Engines

From the source of {versions}.

Names are as in their code. "no": nothing of it was found in the source; "not known": the source
does not answer it. Accelerate also starts Megatron-LM, whose features are not repeated. Ours is
simulated on any device; [what runs where](what-runs-where.md) lists what has run on kernels."""


@dataclass(frozen=True)
class Proof:
    """A mark of a test. ``test``: its file, and its name in it."""

    system: str
    feature: str
    how: str
    test: str


def proofs(folder: Path = ROOT / "tests") -> Iterator[Proof]:
    """The marks `tests.shared.proves` of all tests. ValueError for one that is not written as a
    literal."""
    for path in sorted(folder.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                test = f"{path.relative_to(folder.parent).as_posix()}::{node.name}"
                for mark in node.decorator_list:
                    if (
                        isinstance(mark, ast.Call)
                        and ast.unparse(mark.func) == "proves"
                    ):
                        yield from _proofs(mark, test)


def _proofs(mark: ast.Call, test: str) -> Iterator[Proof]:
    try:
        system, *features = map(ast.literal_eval, mark.args)
        options = {
            keyword.arg: ast.literal_eval(keyword.value) for keyword in mark.keywords
        }
    except ValueError as error:
        raise ValueError(
            f"{test}: the mark is proves(system, feature, ..., how=...)"
        ) from error
    for feature in features:
        yield Proof(system, feature, options.get("how", "own"), test)


def tests_of(system: str, feature: str, found: list[Proof]) -> str:
    """The tests of a feature, as a cell; empty without one."""
    mine = [
        proof for proof in found if (proof.system, proof.feature) == (system, feature)
    ]
    return "<br>".join(
        f"`{proof.test.removeprefix('tests/')}`: {HOW[proof.how]}" for proof in mine
    )


def line(feature: Feature, found: list[Proof]) -> list[str]:
    """The cells of a feature."""
    tests = tests_of(feature.system, feature.name, found)
    return [feature.name, feature.where, tests or "none", feature.note]


def comparison(row: Comparison, found: list[Proof]) -> list[str]:
    """The cells of a row of the table of engines, ours last."""
    ours = [tests_of(FIELD, row.name, found), row.note]
    peers = [row.peers.get(peer, "no") for peer in PEERS]
    return [row.name, *peers, "<br>".join(filter(None, ours))]


def engines(found: list[Proof]) -> str:
    """The table of engines, with what its cells are from."""
    versions = ", ".join(f"{peer} {version}" for peer, version in PEERS.items())
    headings = " | ".join(["feature", *PEERS, "ours"])
    rows = table(headings, [comparison(row, found) for row in COMPARISONS])
    return f"{ENGINES.format(versions=versions)}\n\n{rows}"


def render() -> str:
    """The text of docs/parity.md."""
    found = list(proofs())
    parts = [PREAMBLE, engines(found)]
    for system, (document, run) in DOCUMENTS.items():
        rows = [
            line(feature, found) for feature in FEATURES if feature.system == system
        ]
        lines = table("feature | section | tests | remarks", rows)
        parts.append(f"## {system}\n\n{document}. {run}\n\n{lines}")
    return "\n\n".join(parts) + "\n"
