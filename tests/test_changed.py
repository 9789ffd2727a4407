"""`make check`: the tests that it chooses for the files that changed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.changed import NAMED, changed, mirrors_of

ROOT = Path(__file__).parents[1]
PAGE = "tests/test_readme.py::test_python_blocks_run"

CHOSEN = {
    "tests/fp8/lab/test_doctor.py": ["tests/fp8/lab/test_doctor.py"],
    "fp8/lab/doctor.py": ["tests/fp8/lab/test_doctor.py"],
    "fp8/lab/preflight/verdict.py": ["tests/fp8/lab/preflight/test_verdict.py"],
    "fp8/formats/quantize.py": [
        "tests/fp8/formats/test_quantize.py",
        "tests/fp8/formats/test_quantize_autograd.py",
    ],
    "unit_scaling/rules/batch.py": ["tests/unit_scaling/rules/test_batch.py"],
    "unit_scaling/transforms/run/gradients.py": sorted(
        path.relative_to(ROOT).as_posix() for path in ROOT.glob("tests/transforms/run/test_*.py")
    ),
    "notebooks/nanogpt/data.py": ["tests/nanogpt/test_data.py"],
    "tests/public_names.py": ["tests/test_changelog.py"],
    "docs/adapters.md": [f"{PAGE}[docs/adapters.md]"],
    "README.md": [f"{PAGE}[README.md]"],
    "tests/fp8/test_that_was_removed.py": [],
    "docs/removed.md": [],
    "benchmarks/ops.py": [],
    "docs/demo.png": [],
}


@pytest.mark.parametrize("path", CHOSEN)
def test_a_file_chooses_its_tests(path):
    assert mirrors_of(path) == CHOSEN[path]


def test_a_helper_chooses_the_tests_that_import_it():
    chosen = mirrors_of("tests/fp8/oracles.py")
    assert "tests/fp8/formats/test_quantize.py" in chosen
    assert "tests/fp8/lab/test_doctor.py" not in chosen


def test_what_is_chosen_can_be_run():
    pages = mirrors_of("README.md") + mirrors_of("docs/adapters.md")
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *NAMED.values(), *pages]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(pages) <= set(done.stdout.splitlines())


def test_most_sources_have_tests():
    """Of their name, or of their folder."""
    sources = [p for name in ("fp8", "unit_scaling") for p in (ROOT / name).rglob("*.py")]
    without = [p for p in sources if not mirrors_of(p.relative_to(ROOT).as_posix())]
    assert len(without) < len(sources) / 10, without


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Of main, with a commit, and of a branch from it."""
    commit(tmp_path, "init", "-q", "-b", "main")
    for name in ("stays.py", "edited.py", "removed.py", "old.py"):
        (tmp_path / name).write_text(f"{name} = 1\n" * 9)
    commit(tmp_path, "add", "-A")
    commit(tmp_path, "commit", "-q", "-m", "first")
    commit(tmp_path, "switch", "-q", "-c", "branch")
    return tmp_path


def commit(root: Path, *args: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *who, *args], cwd=root, check=True, capture_output=True)


def edit(root: Path) -> None:
    (root / "edited.py").write_text("x = 1\n")
    commit(root, "commit", "-qam", "second")
    (root / "old.py").rename(root / "renamed one.py")
    (root / "removed.py").unlink()
    (root / "staged.py").write_text("")
    commit(root, "add", "staged.py")
    (root / "untracked.py").write_text("")
    (root / ".gitignore").write_text("ignored.py\n")
    (root / "ignored.py").write_text("")


OTHERS = [".gitignore", "old.py", "removed.py", "renamed one.py", "staged.py", "untracked.py"]


def test_committed_and_uncommitted_changes_count(repository):
    edit(repository)
    assert changed(repository) == ("main", sorted([*OTHERS, "edited.py"]))


def test_what_main_has_since_then_does_not(repository):
    commit(repository, "switch", "-q", "main")
    (repository / "stays.py").write_text("")
    commit(repository, "commit", "-qam", "of others")
    commit(repository, "switch", "-q", "branch")
    assert changed(repository) == ("main", [])
    edit(repository)
    assert "stays.py" not in changed(repository).files


def test_without_main_there_is_its_remote_or_the_last_commit(repository):
    edit(repository)
    commit(repository, "branch", "-m", "main", "other")
    assert changed(repository) == ("HEAD", OTHERS)
    commit(repository, "update-ref", "refs/remotes/origin/main", "other")
    assert changed(repository) == ("origin/main", sorted([*OTHERS, "edited.py"]))


def test_it_says_what_nothing_mirrors():
    done = subprocess.run(
        [sys.executable, "-m", "tests.changed"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert " files changed since " in done.stderr
    for file in changed().files:
        assert bool(mirrors_of(file)) != (f"no test mirrors {file}\n" in done.stderr)
