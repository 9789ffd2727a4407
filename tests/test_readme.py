"""The documents: Python blocks run and print what they are said to print, links lead somewhere.

A ```python block is executed, all blocks of a file in one namespace. A ```text block right after it
is its output, to the letter. Blocks that are not to be run are marked otherwise.
"""

from __future__ import annotations

import contextlib
import functools
import io
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import fp8.formats.format
import fp8.recipes.recipe
from unit_scaling.rules import table as ops

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

NATIVE = [
    ROOT / "docs" / page for page in ("adapters.md", "converted-layers.md", "saved-operands.md")
]
"""Print what the FP8 products of this CPU do."""

each_document = pytest.mark.parametrize(
    "path",
    [pytest.param(p, marks=[pytest.mark.native] if p in NATIVE else []) for p in DOCUMENTS],
    ids=lambda path: path.relative_to(ROOT).as_posix(),
)

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$\n?", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block. ``line``: where its first line is. ``adjacent``: follows the last block."""

    language: str
    text: str
    line: int
    adjacent: bool


def blocks(path: Path) -> list[Block]:
    document = path.read_text(encoding="utf-8")
    found, end = [], 0
    for match in FENCE.finditer(document):
        found.append(
            Block(
                language=match[1],
                text=match[2],
                line=document.count("\n", 0, match.start(2)) + 1,
                adjacent=not document[end : match.start()].strip(),
            )
        )
        end = match.end()
    return found


@pytest.fixture
def _tables() -> Iterator[None]:
    """Puts back what the examples of CONTRIBUTING add to the tables."""
    tables = [
        ops.OPS,
        ops._BY_FUNCTION,
        ops._SIGNATURES,
        fp8.formats.format.FORMATS,
        fp8.recipes.recipe.RECIPES,
    ]
    before = [dict(table) for table in tables]
    yield
    for table, rows in zip(tables, before, strict=True):
        table.clear()
        table.update(rows)


# torch's compiler makes an instance of every autograd.Function it meets, which torch warns of.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
# Trainers' own: of torch's trees, of few workers, of folders and devices.
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
@pytest.mark.filterwarnings("ignore::UserWarning:lightning.*")
# Of transformers, which PEFT brings up.
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.usefixtures("_tables")
@each_document
def test_python_blocks_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    # Without a C compiler, and in a tenth of the time; other tests compile to the end.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    module = types.ModuleType(f"{path.stem}_examples")  # the compiler looks functions' modules up
    monkeypatch.setitem(sys.modules, module.__name__, module)
    torch.manual_seed(0)
    printed = ""
    for block in blocks(path):
        if block.language == "python":
            code = compile("\n" * (block.line - 1) + block.text, str(path), "exec")
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(code, vars(module))
            printed = out.getvalue()
        elif block.language == "text" and block.adjacent and printed:
            assert block.text == printed, f"line {block.line}: the code above prints otherwise"
            printed = ""


@each_document
def test_every_block_names_its_language(path: Path):
    document = path.read_text(encoding="utf-8")
    assert document.count("```") == 2 * len(blocks(path))
    assert {block.language for block in blocks(path)} <= {"python", "text", "bash"}


@each_document
def test_links_lead_somewhere(path: Path):
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text(encoding="utf-8"))
    local = [target for target in targets if not target.startswith(("http:", "https:"))]
    missing = [target for target in local if not (path.parent / target).exists()]
    assert not missing


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    documents = "\n".join(path.read_text(encoding="utf-8") for path in DOCUMENTS)
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", documents, re.MULTILINE))
    assert named <= set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    assert {"demo", "test"} <= named


@pytest.mark.parametrize(("target", "extras"), [("demo", ["demo"]), ("test", ["demo", "dev"])])
def test_a_make_target_installs_what_it_needs(target, extras, tmp_path):
    command = ["make", "--dry-run", target, f"VENV={tmp_path / 'venv'}"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert re.findall(r"\.\[(\w+)\]", said) == extras


def test_readme_is_short():
    """At most 120 lines, about twenty of them code: other details belong in docs/."""
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120
    code = [b.text for b in blocks(ROOT / "README.md") if b.language == "python"]
    lines = [line for text in code for line in text.splitlines() if line.strip()]
    assert 15 <= len(lines) <= 30
