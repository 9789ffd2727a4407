"""`python -m tests.public_names` adds to tests/names_gone.txt the public names of a commit that are
not here any more. The first line has that commit, and HEAD afterwards. tests/test_changelog.py
looks for each of the names in CHANGELOG.md.

Public are the modules of the API reference, what they export, and the keys of `TABLES`. A name that
its module still has, or that another one lists, is not gone.
"""

import ast
import importlib
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
GONE = Path(__file__).with_name("names_gone.txt")
PACKAGES = ("fp8", "unit_scaling")

TABLES = {
    "FORMATS": "format",
    "RECIPES": "recipe",
    "RULES": "rule",
    "SCALINGS": "scaling",
    "ROUNDINGS": "rounding",
    "ENCODINGS": "encoding",
    "LEVELS": "level",
    "ROLES": "role",
    "CONSTRAINTS": "constraint",
    "LR_RULES": "learning-rate rule",
    "BACKENDS": "backend",
    "ADAPTERS": "backend",
    "TENSOR_CORES": "accumulate",
    "HARDWARE": "hardware",
}
"""A table, or a tuple of names, that users choose from -> what it holds."""


def public(modules):
    """The public names of the packages that can be imported: "module fp8.optim", "fp8.autocast",
    "format e4m3"."""
    found = set()
    for name in modules:
        try:
            exported = importlib.import_module(name).__all__
        except Exception as error:  # an old commit that this torch does not run
            print(f"{name}: {error}", file=sys.stderr)
            continue
        found.add(f"module {name}")
        found |= {f"{name}.{export}" for export in exported if export[0] != "_"}
    loaded = [
        m for name, m in [*sys.modules.items()] if name.partition(".")[0] in PACKAGES
    ]
    for module, (table, kind) in itertools.product(loaded, TABLES.items()):
        rows = vars(module).get(table, ())
        found |= {f"{kind} {row}" for row in rows if isinstance(row, str)}
    return found


def documented(root):
    """The modules of the API reference, MODULES of a file in docs/, and all adapters."""
    found = list(PACKAGES)
    for path in root.glob("docs/*.py"):
        for node in ast.parse(path.read_text()).body:
            if (
                isinstance(node, ast.Assign)
                and ast.unparse(node.targets[0]) == "MODULES"
            ):
                found += ast.literal_eval(node.value)
    found += [
        f"fp8.adapters.{path.stem}" for path in root.glob("fp8/adapters/[a-z]*.py")
    ]
    return list(dict.fromkeys(found))


def is_here(name, now):
    """Whether a public name is still there, or listed by another module. now: `public` of today."""
    kind, _, module = name.rpartition(" ")
    if kind == "module":
        try:
            return importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:  # its parent is gone
            return False
    return name in now or (
        not kind and (_last(name) in map(_last, now) or _is_read(name))
    )


def _is_read(name):
    """Whether a module has the name, listed or not."""
    home, _, last = name.rpartition(".")
    return is_here(f"module {home}", set()) and hasattr(
        importlib.import_module(home), last
    )


def _last(name):
    return name.rpartition(".")[2]


def of_commit(commit):
    """`public` of a commit, in a process that imports its packages."""
    code = "from tests.public_names import *; print(json.dumps([*public(documented(Path()))]))"
    with tempfile.TemporaryDirectory() as folder:
        archive = ["git", "archive", commit, *PACKAGES, "docs"]
        packed = subprocess.check_output(archive, cwd=ROOT)
        subprocess.run(["tar", "x"], input=packed, cwd=folder, check=True)
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        run = [sys.executable, "-c", code]
        return json.loads(subprocess.check_output(run, cwd=folder, env=environment))


def as_text(gone):
    """A line for each module, "fp8.optim: Muon SGD", or kind, "format: e1m2". A name that several
    modules exported is in the line of the first."""
    lines = defaultdict[str, list[str]](list)
    seen = set()
    for name in sorted(gone, key=lambda name: (name.count("."), name)):
        home, leaf = name.rsplit(" " if " " in name else ".", 1)
        if " " in name or leaf not in seen:
            lines[home].append(leaf)
            seen.add(leaf)
    return "".join(
        f"{home}: {' '.join(leaves)}\n" for home, leaves in sorted(lines.items())
    )


def read():
    """The names in the list, as `public` has them."""
    text = GONE.read_text()
    lines = [line.split(": ") for line in text.splitlines() if not line.startswith("#")]
    kinds = {"module", *TABLES.values()}
    return [
        f"{home} {name}" if home in kinds else f"{home}.{name}"
        for home, names in lines
        for name in names.split()
    ]


def main():
    about, _, last = GONE.read_text().splitlines()[0].rpartition(" ")
    head = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True)
    now = public(documented(ROOT))
    seen = {*read(), *of_commit(last)}
    gone = [name for name in seen if not is_here(name, now)]
    GONE.write_text(f"{about} {head}{as_text(gone)}")


if __name__ == "__main__":
    main()
