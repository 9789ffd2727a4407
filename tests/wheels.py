"""Published wheels that cannot be imported here: fetched, and their signatures read."""

import ast
import subprocess
import sys
import zipfile

import pytest


def unpacked(requirement, folder):
    """The unpacked wheel of ``name==version``, without what it needs. Skips the test, with the
    reason, where the package index cannot be reached."""
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
    ]
    options = "--no-deps --only-binary=:all: --retries=0 --timeout=10".split()
    run = [*pip, *options, "--dest", str(folder), requirement]
    try:
        done = subprocess.run(run, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        pytest.skip(f"{requirement} was not fetched within a minute")
    if done.returncode:
        pytest.skip(
            f"{requirement} cannot be fetched: {done.stderr.strip().splitlines()[-1:]}"
        )
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "unpacked")
    return folder / "unpacked"


def _body(path, name):
    """The class, function or method of that dotted name."""
    body = ast.parse(path.read_text()).body
    for part in name.split("."):
        found = [node for node in body if getattr(node, "name", None) == part]
        node = found[-1]  # of several, the one that stays
        body = getattr(node, "body", [])
    return node


def signature(path, name):
    """The parameters of a function or method, with their defaults and without annotations."""
    node = _body(path, name)
    assert isinstance(node, ast.FunctionDef)
    given = node.args
    for argument in (
        *given.posonlyargs,
        *given.args,
        *given.kwonlyargs,
        given.vararg,
        given.kwarg,
    ):
        if argument is not None:
            argument.annotation = None
    return ast.unparse(given)
