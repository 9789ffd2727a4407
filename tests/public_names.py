"""`python -m tests.public_names`: writes tests/names_gone.txt, the public names of earlier commits
that are not here any more. tests/test_changelog.py looks for each of them in CHANGELOG.md.

Public are the modules of the API reference, what they export, and the keys of `TABLES`, each at its
commit. A name that its module still has, or that another one lists, is not gone.
Needs the whole history, and a second or two for each commit that it looks at.
"""

import ast
import importlib
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import tarfile
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

LINES = r'^__all__|^ +"[A-Za-z_0-9.]+"[,:]|^ +(_all|_add)\(|^_add\(|^@(row|op)\b'
"""Every commit that changes such a line, an entry of a list or table, in a file of `TABLED` is
looked at, and every `EVERY`-th one."""
TABLED = (
    *"fp8/__init__.py fp8/optim fp8/adapters fp8/recipes fp8/formats fp8/levels".split(),
    *(
        "fp8/*recipe*",
        "fp8/*scal*",
        "fp8/*format*",
        "fp8/*round*",
        "fp8/*encod*",
        "fp8/*hardware*",
    ),
    *(
        "unit_scaling/__init__.py",
        "unit_scaling/functional.py",
        "unit_scaling/modules.py",
    ),
    *(
        "unit_scaling/ops",
        "unit_scaling/optim.py",
        "unit_scaling/transforms/__init__.py",
    ),
    *("docs/reference.py", "docs/build.py", "fp8/training"),
)
EVERY = 20


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


def commits():
    """Those of the main line to look at, oldest first."""
    every = _log()
    chosen = {*every[::EVERY], *_log(f"-G{LINES}", "--", *TABLED)}
    return [commit for commit in every if commit in chosen]


def _log(*args):
    log = ["git", "log", "--first-parent", "-m", "--format=%h", "--reverse", *args]
    return subprocess.check_output(log, cwd=ROOT, text=True).split()


def of_commit(commit):
    """`public` of a commit, in a process of its own, which has torch already."""
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            with tempfile.TemporaryDirectory() as folder:
                tops = subprocess.check_output(
                    ["git", "ls-tree", "--name-only", commit], cwd=ROOT
                )
                wanted = {*PACKAGES, "docs"} & {*tops.decode().split()}
                packed = subprocess.Popen(
                    ["git", "archive", commit, *wanted], cwd=ROOT, stdout=-1
                )
                with tarfile.open(fileobj=packed.stdout, mode="r|") as archive:
                    archive.extractall(folder)
                # Not those that are installed or lie here.
                sys.path[:] = [
                    folder,
                    *(p for p in sys.path if not (Path(p) / "fp8").exists()),
                ]
                sys.meta_path[:] = [
                    f for f in sys.meta_path if "editable" not in str(f)
                ]
                names = public(documented(Path(folder)))
                os.write(write, json.dumps(sorted(names)).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.wait()
    return set(json.loads(text or "[]"))


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
    # Before the forks, as what takes long.
    importlib.import_module("torch.distributed.fsdp")
    looked_at = commits()
    seen = set().union(*map(of_commit, looked_at))
    now = of_commit("HEAD")
    gone = [name for name in seen if not is_here(name, now)]
    about = (
        f"# Written by `python -m tests.public_names`, up to commit {looked_at[-1]}.\n"
    )
    GONE.write_text(about + as_text(gone))


if __name__ == "__main__":
    main()
