"""`python -m tests.public_names`: writes tests/names_gone.txt, the public names of the commits
before that are not here any more. tests/test_changelog.py looks for each in CHANGELOG.md.

Public are the names in the ``__all__`` of a module, the module itself, and the keys of `TABLES`. A
name that another module exports today has moved; it is not in the list, its old module is. Needs the
whole history, and half a second for each commit that it looks at.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import subprocess
import sys
import tarfile
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
GONE = Path(__file__).with_name("names_gone.txt")
PACKAGES = ("fp8", "unit_scaling")
EVERY = 20

TABLES = {
    **{"FORMATS": "format", "RECIPES": "recipe", "RULES": "rule", "SCALINGS": "scaling"},
    **{"ROUNDINGS": "rounding", "ENCODINGS": "encoding", "LEVELS": "level"},
    **{"CONSTRAINTS": "constraint", "LR_RULES": "learning-rate rule", "BACKENDS": "backend"},
    **{"ADAPTERS": "backend", "ROLES": "role"},
}
"""A table, or a tuple of names, that a user chooses from -> what it holds."""

LINES = (
    r"__all__|^ *\"[A-Za-z_0-9]+\"[,:]|^ *(_all|_add|_stored|Recipe|Format|replace)\(|^@(row|op)\b"
)
"""Every commit that changes such a line is looked at, an entry of a list or table, and every
`EVERY`-th one."""


def public(packages: Iterable[str] = PACKAGES) -> set[str]:
    """The public names: "fp8.autocast", "module fp8.optim", "format e4m3"."""
    found = set()
    for module in modules(packages):
        listed = vars(module).get("__all__")
        if listed is not None:
            found.add(f"module {module.__name__}")
            found |= {f"{module.__name__}.{name}" for name in listed if name[0] != "_"}
        for table, kind in TABLES.items():
            rows = vars(module).get(table)
            if isinstance(rows, Mapping | tuple | list):
                found |= {f"{kind} {row}" for row in rows if isinstance(row, str)}
    return found


def modules(packages: Iterable[str]) -> Iterator[object]:
    for package in packages:
        yield (top := importlib.import_module(package))
        for info in pkgutil.walk_packages(top.__path__, f"{package}."):
            if not any(part.startswith("_") for part in info.name.split(".")):
                try:
                    yield importlib.import_module(info.name)
                except Exception as error:
                    print(f"{info.name}: {error}", file=sys.stderr)


def of_commit(commit: str) -> set[str]:
    """`public` of a commit, in a process of its own, which has torch already."""
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            with tempfile.TemporaryDirectory() as folder:
                archive = ["git", "archive", commit, *PACKAGES]
                with subprocess.Popen(archive, cwd=ROOT, stdout=subprocess.PIPE) as packed:
                    tarfile.open(fileobj=packed.stdout, mode="r|").extractall(folder)
                sys.path[:] = [folder, *(p for p in sys.path if not (Path(p) / "fp8").exists())]
                sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in str(f)]
                os.write(write, json.dumps(sorted(public())).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.wait()
    return set(json.loads(text or "[]"))


def commits() -> list[str]:
    """Those of the main line to look at, oldest first."""
    log = ["git", "log", "--first-parent", "-m", "--format=%h", "--reverse"]
    run = lambda *args: subprocess.check_output([*log, *args], cwd=ROOT, text=True).split()
    every = run()
    chosen = {*every[::EVERY], *run(f"-G{LINES}", "--", *PACKAGES)}
    return [commit for commit in every if commit in chosen]
