"""`python -m tests.changed`: the tests of files that changed since main, as arguments of pytest.

Compares the working tree, with what is not committed and not tracked, with the last commit that it
shares with main. A test file runs itself; a source file the tests with its name in the folder that
mirrors its own (`MIRRORS`), or all of that folder if none has; a helper of tests the tests that
import it; a page its blocks. A file that no test mirrors is named on stderr.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]

MIRRORS = {
    "unit_scaling/transforms": "tests/transforms",
    "unit_scaling": "tests/unit_scaling",
    "fp8": "tests/fp8",
    "notebooks/nanogpt": "tests/nanogpt",
}
"""A folder -> that of its tests. The first that fits counts."""

README = "tests/test_readme.py"

NAMED = {
    "CHANGELOG.md": "tests/test_changelog.py",
    "CONTRIBUTING.md": f"{README}::test_the_diffs_of_contributing_add_what_they_say",
    "Makefile": f"{README}::test_make_targets_exist_and_install_what_they_need",
    "pyproject.toml": "tests/test_packaging.py",
}
"""A file of another kind -> its tests."""


class Changes(NamedTuple):
    """since: what the working tree was compared with. files: those that differ."""

    since: str
    files: list[str]


def mirrors_of(path, root=ROOT):
    """The tests of a file, which may be gone, as arguments of pytest."""
    file = Path(path)
    if path in NAMED:
        return [NAMED[path]]
    if path == "README.md" or (path.startswith("docs/") and file.suffix == ".md"):
        page = f"{README}::test_python_blocks_run[{path}]"
        return [page] if (root / path).exists() else []
    if file.suffix != ".py":
        return []
    if path.startswith("tests/"):
        found = [file] if file.name.startswith("test_") else _importers(file, root)
    else:
        found = _by_name(file, root)
    return sorted(test.as_posix() for test in found if (root / test).exists())


def _importers(helper, root):
    """The test files that name the module of a helper."""
    folder, name = ".".join(helper.parts[:-1]), helper.stem
    forms = (f"{folder}.{name}", f"from {folder} import {name}")
    tests = [(test, test.read_text()) for test in root.glob("tests/**/test_*.py")]
    return [
        test.relative_to(root)
        for test, text in tests
        if any(form in text for form in forms)
    ]


def _by_name(source, root):
    home = next((home for home in MIRRORS if Path(home) in source.parents), None)
    if home is None:
        return []
    folder = root / MIRRORS[home] / source.parent.relative_to(home)
    own = [
        *folder.glob(f"test_{source.stem}.py"),
        *folder.glob(f"test_{source.stem}_*.py"),
    ]
    return [test.relative_to(root) for test in own or folder.glob("test_*.py")]


def changed(root=ROOT):
    """The files that differ from main, else origin/main, else the last commit."""
    since = base = "HEAD"
    for name in ("main", "origin/main"):
        if shared := _git(root, "merge-base", "HEAD", name):
            since, (base,) = name, shared
            break
    differ = _git(root, "diff", "--name-only", "--no-renames", "-z", base)
    new = _git(root, "ls-files", "--others", "--exclude-standard", "-z")
    return Changes(since, sorted({*differ, *new}))


def _git(root, *args):
    """The items that git prints; none if it fails, as where a branch is not known."""
    done = subprocess.run(
        ["git", *args], cwd=root, capture_output=True, text=True, check=False
    )
    return (
        done.stdout.replace("\0", "\n").split("\n")[:-1] if done.returncode == 0 else []
    )


def main():
    since, files = changed()
    print(f"{len(files)} files changed since {since}", file=sys.stderr)
    tests = dict[str, None]()
    for file in files:
        found = mirrors_of(file)
        tests |= dict.fromkeys(found)
        if not found:
            print(f"  no test mirrors {file}", file=sys.stderr)
    print(*tests, sep="\n")


if __name__ == "__main__":
    main()
