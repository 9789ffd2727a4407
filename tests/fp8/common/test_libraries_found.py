"""The door to other libraries: found, missing or broken, and how to get them."""

import sys
from pathlib import Path

import pytest

from fp8.common.libraries import LIBRARIES, need, probe
from tests.shared import parametrize, refuses

BREAKS = {
    "raise RuntimeError('Found empty meta package')": "RuntimeError: Found empty meta package",
    "raise OSError('libcudart.so: cannot open')": "OSError: libcudart.so: cannot open",
    "import nothing_of_that_name": "ModuleNotFoundError: No module named 'nothing_of_that_name'",
    "raise AssertionError": "AssertionError: ",
}


@pytest.fixture(autouse=True)
def _same_modules():
    """What a test imports, nothing else sees."""
    before = dict(sys.modules)
    yield
    for name in sys.modules.keys() - before.keys():
        del sys.modules[name]
    sys.modules.update(before)


def forget(name, monkeypatch):
    """The package of a library, which is imported anew."""
    top = LIBRARIES[name].module.partition(".")[0]
    for loaded in [module for module in sys.modules if module.partition(".")[0] == top]:
        monkeypatch.delitem(sys.modules, loaded)
    return top


def pretend(name, body, folder, monkeypatch):
    """A package of that name, with that body."""
    top = forget(name, monkeypatch)
    (folder / top).mkdir()
    (folder / top / "__init__.py").write_text(body)
    monkeypatch.syspath_prepend(folder)


@parametrize("body", BREAKS)
def test_a_broken_library_is_told_from_a_missing_one(body, tmp_path, monkeypatch):
    name = "composer"
    pretend(name, body, tmp_path, monkeypatch)
    found = probe(name)
    assert (found.status, found.why) == ("broken", BREAKS[body])
    with refuses("is broken", ImportError) as raised:
        need(name)
    assert BREAKS[body] in str(raised.value)
    assert LIBRARIES[name].get in str(raised.value)
    assert type(raised.value.__cause__).__name__ in BREAKS[body]


@parametrize("name", LIBRARIES)
def test_a_missing_library_is_told_how_to_get(name, monkeypatch):
    top = forget(name, monkeypatch)
    monkeypatch.setattr(sys, "meta_path", [Without(top), *sys.meta_path])
    assert probe(name).status == "missing"
    with refuses(rf"{name} is not installed: ", ImportError) as raised:
        need(name)
    assert LIBRARIES[name].get in str(raised.value)


class Without:
    """A finder that finds no package of that name."""

    def __init__(self, top):
        self.top = top

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == self.top:
            raise ModuleNotFoundError(f"No module named {self.top!r}", name=self.top)


def test_a_part_that_is_missing_is_broken(tmp_path, monkeypatch):
    """transformer_engine without the part for torch."""
    pretend("transformer_engine", "", tmp_path, monkeypatch)
    found = probe("transformer_engine")
    assert found.status == "broken"
    assert "transformer_engine.pytorch" in found.why


def test_a_library_that_is_there():
    found = probe("safetensors")
    assert (found.status, found.why, found.error) == ("found", "", None)
    assert found.version[0].isdigit()
    assert need("safetensors").save_file


def test_extras_are_those_of_the_project():
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    for library in LIBRARIES.values():
        extra = library.get.partition("unit-scaling-fp8[")[2].partition("]")[0]
        assert not extra or f"\n{extra} = [" in text
