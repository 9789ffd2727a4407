"""The documents: Python blocks run and print what they are said to print, links lead somewhere.

A ```python block is executed, all blocks of a file in one namespace. A ```text block right after it
is its output, to the letter. Blocks that are not to be run are marked otherwise. The ```diff blocks
of CONTRIBUTING are applied to a copy of the packages, with which its python blocks are run.
"""

from __future__ import annotations

import contextlib
import io
import re
import shutil
import sys
import types
from dataclasses import dataclass

import pytest
import torch

from docs import words
from tests.launch import ROOT, python, ran

CONTRIBUTING = ROOT / "CONTRIBUTING.md"
DOCUMENTS = [ROOT / "README.md", CONTRIBUTING, *sorted((ROOT / "docs").glob("*.md"))]

NATIVE = [ROOT / "docs" / page for page in ("adapters.md", "converting.md")]
"""Print what the FP8 products of this CPU do."""


def each(documents):
    """Parametrizes a test by ``path``."""
    params = [
        pytest.param(p, marks=[pytest.mark.native] if p in NATIVE else [])
        for p in documents
    ]
    return pytest.mark.parametrize(
        "path", params, ids=lambda path: path.relative_to(ROOT).as_posix()
    )


each_document = each(DOCUMENTS)

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$\n?", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block. ``line``: where its first line is. ``adjacent``: follows the last block."""

    language: str
    text: str
    line: int
    adjacent: bool


def blocks(path):
    document = path.read_text()
    found, end = [], 0
    for match in FENCE.finditer(document):
        line = document.count("\n", 0, match.start(2)) + 1
        adjacent = not document[end : match.start()].strip()
        found.append(
            Block(language=match[1], text=match[2], line=line, adjacent=adjacent)
        )
        end = match.end()
    return found


# torch's compiler makes an instance of every autograd.Function it meets, which torch warns of.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
# Trainers' own: of torch's trees, of few workers, of folders and devices.
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
@pytest.mark.filterwarnings("ignore::UserWarning:lightning.*")
# Of transformers, which PEFT brings up.
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.usefixtures("own_rows", "no_code")
@each([path for path in DOCUMENTS if path != CONTRIBUTING])
def test_python_blocks_run(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # The compiler looks functions' modules up.
    module = types.ModuleType(f"{path.stem}_examples")
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
            assert block.text == printed, (
                f"line {block.line}: the code above prints otherwise"
            )
            printed = ""


def apply(diff, root):
    """Applies a diff without line numbers: the lines of a hunk must be in the file exactly once. A
    file is new after ``--- /dev/null``."""
    hunks = re.compile(r"^--- (.*)\n\+\+\+ (.*)\n((?:[ +-](?!-- ).*\n)+)", re.MULTILINE)
    for old, new, hunk in hunks.findall(diff):
        lines = hunk.splitlines()
        before = "".join(f"{line[1:]}\n" for line in lines if line[0] in " -")
        after = "".join(f"{line[1:]}\n" for line in lines if line[0] in " +")
        text = "" if old == "/dev/null" else (root / old).read_text()
        assert not before or text.count(before) == 1, (
            f"{old} has other lines than the diff"
        )
        (root / new).write_text(
            text.replace(before, after) if before else after, encoding="utf-8"
        )


def test_the_diffs_of_contributing_add_what_they_say(tmp_path):
    """A format, a recipe, a kernel, an operation, an adapter: the code below each runs with all."""
    for package in ("fp8", "unit_scaling"):
        shutil.copytree(
            ROOT / package,
            tmp_path / package,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    found = blocks(CONTRIBUTING)
    diffs = [block.text for block in found if block.language == "diff"]
    assert len(diffs) == 5
    for diff in diffs:
        apply(diff, tmp_path)
    code = "".join(block.text for block in found if block.language == "python")
    python("-c", code, cwd=tmp_path, timeout=250)


@each_document
def test_blocks_name_their_language_and_links_lead_somewhere(path):
    document = path.read_text()
    assert document.count("```") == 2 * len(blocks(path))
    assert {block.language for block in blocks(path)} <= {
        "python",
        "text",
        "bash",
        "diff",
    }
    text = re.sub("```.*?```", "", document, flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text)
    local = [target for target in targets if not target.startswith(("http:", "https:"))]
    assert not [target for target in local if not (path.parent / target).exists()]


def test_make_targets_exist_and_install_what_they_need(tmp_path):
    makefile = (ROOT / "Makefile").read_text()
    documents = "\n".join(path.read_text() for path in DOCUMENTS)
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", documents, re.MULTILINE))
    assert (
        {"demo", "test"}
        <= named
        <= set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    )
    for target, extras in (("demo", ["demo"]), ("test", ["demo", "dev"])):
        said = ran("make", "--dry-run", target, f"VENV={tmp_path / 'venv'}")
        assert re.findall(r"\.\[(\w+)\]", said) == extras


def test_checks_run():
    """CI runs lint and the README's test command; CONTRIBUTING and pre-commit the short one."""
    ci = (ROOT / ".ci" / "run").read_text()
    assert re.findall(r"^make ([a-z-]+)$", ci, re.MULTILINE) == ["lint", "test"]
    assert re.search(r"^make check ", CONTRIBUTING.read_text(), re.MULTILINE)
    assert "entry: make check\n" in (ROOT / ".pre-commit-config.yaml").read_text(
        encoding="utf-8"
    )
    said = ran("make", "--dry-run", "check")
    assert all(
        part in said for part in ("bin/ruff check", "bin/mypy\n", "tests.changed")
    )
    assert "tests/test_smoke.py" in said


def test_pages_are_short():
    """README: 90 lines, about twenty of them code; CONTRIBUTING 1,800 words; all together."""
    readme = ROOT / "README.md"
    assert len(readme.read_text().splitlines()) <= 90
    code = [b.text for b in blocks(readme) if b.language == "python"]
    assert (
        15
        <= len([line for text in code for line in text.splitlines() if line.strip()])
        <= 30
    )
    assert sum(map(words.words, words.pages())) <= words.LIMIT
    assert words.words(CONTRIBUTING) <= 1800
    assert {path.stem for path in words.pages()} >= {
        "README",
        "index",
        "recipes",
        "resume",
    }
