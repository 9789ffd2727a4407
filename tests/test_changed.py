"""`make check`: the tests that it chooses for the files that changed."""

import subprocess

import pytest

from tests.changed import NAMED, changed, mirrors_of
from tests.launch import ROOT, python

PAGE = "tests/test_readme.py::test_python_blocks_run"

CHOSEN = {
    "tests/fp8/lab/test_doctor.py": ["tests/fp8/lab/test_doctor.py"],
    "fp8/lab/doctor.py": ["tests/fp8/lab/test_doctor.py"],
    "fp8/formats/quantize.py": [
        "tests/fp8/formats/test_quantize.py",
        "tests/fp8/formats/test_quantize_autograd.py",
    ],
    "unit_scaling/transforms/utils.py": ["tests/transforms/test_utils.py"],
    "notebooks/nanogpt/data.py": ["tests/nanogpt/test_data.py"],
    "tests/public_names.py": ["tests/test_changelog.py"],
    "docs/adapters.md": [f"{PAGE}[docs/adapters.md]"],
    "docs/removed.md": [],
    "benchmarks/sums.py": [],
}


@pytest.mark.parametrize("path", CHOSEN)
def test_a_file_chooses_its_tests(path):
    assert mirrors_of(path) == CHOSEN[path]


def test_what_is_chosen_can_be_run():
    pages = mirrors_of("README.md") + mirrors_of("docs/adapters.md")
    command = "-m", "pytest", "--collect-only", "-q", *NAMED.values(), *pages
    assert set(pages) <= set(python(*command, warnings="default").splitlines())


def test_most_sources_have_tests():
    """Of their name, or of their folder."""
    sources = [
        p for name in ("fp8", "unit_scaling") for p in (ROOT / name).rglob("*.py")
    ]
    without = [p for p in sources if not mirrors_of(p.relative_to(ROOT).as_posix())]
    assert len(without) < len(sources) / 10, without


@pytest.fixture
def repository(tmp_path):
    """Of main, with a commit, and of a branch from it."""
    commit(tmp_path, "init", "-q", "-b", "main")
    for name in ("stays.py", "edited.py", "old.py"):
        (tmp_path / name).write_text(f"{name} = 1\n" * 9)
    commit(tmp_path, "add", "-A")
    commit(tmp_path, "commit", "-q", "-m", "first")
    commit(tmp_path, "switch", "-q", "-c", "branch")
    return tmp_path


def commit(root, *args):
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *who, *args], cwd=root, check=True, capture_output=True)


def test_changes_are_those_since_main(repository):
    """Of commits and of the working tree; not what main has since then."""
    (repository / "edited.py").write_text("x = 1\n")
    commit(repository, "commit", "-qam", "second")
    (repository / "old.py").rename(repository / "renamed one.py")
    (repository / "untracked.py").write_text("")
    (repository / ".gitignore").write_text("ignored.py\n")
    (repository / "ignored.py").write_text("")
    others = [".gitignore", "old.py", "renamed one.py", "untracked.py"]
    assert changed(repository) == ("main", sorted([*others, "edited.py"]))
    (repository / "ignored.py").unlink()
    commit(repository, "stash", "-q", "--include-untracked")
    commit(repository, "switch", "-q", "main")
    (repository / "stays.py").write_text("")
    commit(repository, "commit", "-qam", "of others")
    commit(repository, "switch", "-q", "branch")
    assert changed(repository) == ("main", ["edited.py"])
    commit(repository, "branch", "-m", "main", "other")
    assert changed(repository) == ("HEAD", [])
    commit(repository, "update-ref", "refs/remotes/origin/main", "other")
    assert changed(repository) == ("origin/main", ["edited.py"])
