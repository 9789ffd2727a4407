"""Every public name of unit-scaling 0.3.5 is here, and can be called as it is called there.

signatures_0.3.5.json lists its public names, with [name, kind, default] of each parameter. Defaults
that are not plain data are given by their types.
"""

import importlib
import inspect
import json
import re
from pathlib import Path

import pytest

import fp8
import unit_scaling
from tests.shared import proves

TABLE = json.loads(Path(__file__).with_name("signatures_0.3.5.json").read_text())

#: Name -> difference -> why.
DELIBERATE = {
    "unit_scaling.transforms.unit_scale": {
        "replace is None, there '<dict>'": "a default that can be changed is shared by all calls"
    },
    **{
        f"unit_scaling.optim.{name}": {
            "lr is None, there 0.001": "without lr, that of the rule"
        }
        for name in ("SGD", "Adam", "AdamW")
    },
}

PLAIN = (int, float, str, bool, type(None))


def as_recorded(default):
    if isinstance(default, list | tuple):
        return [as_recorded(item) for item in default]
    return default if isinstance(default, PLAIN) else f"<{type(default).__name__}>"


NAMES = [f"{module}.{name}" for module, names in TABLE.items() for name in names]


def ours(name):
    module, _, leaf = name.rpartition(".")
    return getattr(importlib.import_module(module), leaf)


def differences(theirs, mine):
    """What stops a call that is right there from meaning the same here."""
    named = {p.name: p for p in mine if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    positional = [
        p.name for p in mine if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    found = []
    for i, (name, kind, *default) in enumerate(theirs):
        if kind in ("VAR_POSITIONAL", "VAR_KEYWORD"):
            continue
        if name not in named:
            found.append(f"no parameter {name}")
        elif kind == "POSITIONAL_OR_KEYWORD" and positional[i : i + 1] != [name]:
            found.append(f"{name} is not parameter {i}")
        elif default and as_recorded(named[name].default) != default[0]:
            found.append(f"{name} is {named[name].default!r}, there {default[0]!r}")
    known = {name for name, *_ in theirs}
    more = [p for n, p in named.items() if n not in known and p.default is p.empty]
    return found + [f"{p.name} has no default" for p in more]


def compare(name, theirs, value):
    if theirs["kind"] == "value":
        return []
    if theirs["kind"] == "module":
        return [] if inspect.ismodule(value) else ["is not a module"]
    if theirs["kind"] == "class" and not inspect.isclass(value) and not callable(value):
        return ["is not a class"]
    try:
        mine = list(inspect.signature(value).parameters.values())
    except (TypeError, ValueError):
        mine = []
    found = differences(theirs["parameters"], mine)
    for member, theirs_of in theirs.get("members", {}).items():
        if not hasattr(value, member):
            found.append(f"no {member}")
        elif theirs_of["kind"] == "function":
            inner = list(inspect.signature(getattr(value, member)).parameters.values())
            found += [
                f"{member}: {d}" for d in differences(theirs_of["parameters"], inner)
            ]
    return found


@proves("unit-scaling", "names, parameters and defaults", how="signatures")
@pytest.mark.parametrize("name", NAMES)
def test_signature(name):
    module, _, leaf = name.rpartition(".")
    assert compare(name, TABLE[module][leaf], ours(name)) == list(
        DELIBERATE.get(name, {})
    )


def test_the_table_is_whole():
    assert len(NAMES) > 90
    assert set(NAMES) >= set(DELIBERATE)
    conv1d = TABLE["unit_scaling.functional"]["conv1d"]["parameters"]
    assert ["padding", "POSITIONAL_OR_KEYWORD", 0] in conv1d
    assert (
        TABLE["unit_scaling.formats"]["FPFormat"]["members"]["quantise"]["kind"]
        == "function"
    )


def test_version():
    """One number, in one place, of both packages and of what is installed."""
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert 'version = { attr = "fp8.version.__version__" }' in project
    assert re.fullmatch(r"\d+\.\d+\.\d+", fp8.__version__)
    assert unit_scaling.__version__ == fp8.__version__
