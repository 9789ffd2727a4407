"""The sdist, and the wheel made of it: what they contain, and that the wheel imports with the core
dependencies alone."""

import json
import re
import shutil
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import torch

from tests import launch
from tests.launch import ROOT
from tests.shared import proves

PACKAGES = {"fp8", "unit_scaling"}
CORE = ("torch", "numpy", "einops")
EXTRAS = set(
    "plot preflight te torchao bitsandbytes accelerate lightning transformers composer docs "
    "dev".split()
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from the sdist, and that from a copy, since a build leaves files in the tree."""
    folder = tmp_path_factory.mktemp("wheel")
    skip = shutil.ignore_patterns(
        ".*", "build", "dist", "out", "__pycache__", "*.egg-info"
    )
    shutil.copytree(ROOT, folder / "source", ignore=skip)
    build = "-m", "build", "--no-isolation", "--outdir", folder, folder / "source"
    launch.python(*build, warnings="default")
    (built,) = folder.glob("*.whl")
    return built


def python(code, *args, flags=()):
    """What the code prints, as JSON, run in a new interpreter."""
    return json.loads(launch.python(*flags, "-c", code, *args))


def test_wheel_holds_the_packages_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    info = f"{wheel.name.removesuffix('-py3-none-any.whl')}.dist-info"
    assert {name.partition("/")[0] for name in names} == {*PACKAGES, info}
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(names)
    assert f"{info}/licenses/LICENSE" in names
    assert {"fp8/lab/preflight/page.html", "fp8/layers/eject.txt"} <= set(names)
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    sources = {path.relative_to(ROOT).as_posix() for path in paths}
    assert {name for name in names if name.endswith(".py")} == sources


def test_sdist_holds_no_part_of_the_tests(wheel):
    (sdist,) = wheel.parent.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        tops = {name.split("/")[1] for name in archive.getnames() if "/" in name}
    assert {*PACKAGES, "pyproject.toml", "README.md", "LICENSE"} <= tops
    assert not tops & {"tests", "benchmarks", "notebooks", "docs"}


def _about(wheel):
    archive = zipfile.ZipFile(wheel)
    (name,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
    return metadata.PathDistribution(
        zipfile.Path(archive, name.removesuffix("METADATA"))
    )


def test_wheel_says_what_it_is(wheel):
    about = _about(wheel)
    fields = about.metadata
    assert (fields["Name"], fields["License-Expression"]) == (
        "unit-scaling-fp8",
        "Apache-2.0",
    )
    needed = {_name(r) for r in about.requires or [] if "extra ==" not in r}
    assert needed == set(CORE)
    assert set(fields.get_all("Provides-Extra")) >= EXTRAS
    commands = {entry.value for entry in about.entry_points if entry.name == "fp8"}
    assert commands == {"fp8.__main__:main"}
    assert "unit_scale" in fields.get_payload()  # the README


def _name(requirement):
    """The distribution of a requirement, spelled one way."""
    found = re.match(r"[\w.-]+", requirement)
    assert found is not None
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def core_distributions():
    """The core dependencies and all that they depend on themselves."""
    known, queue = set(), list(CORE)
    while queue:
        name = queue.pop()
        if name in known:
            continue
        known.add(name)
        try:
            requires = metadata.requires(name) or []
        except metadata.PackageNotFoundError:  # for another platform
            continue
        queue += [_name(r) for r in requires if "extra ==" not in r]
    return known


IMPORT_ALONE = """
import importlib.machinery, json, sys

unpacked, site, blocked = json.loads(sys.argv[1])
sys.path[:0] = [unpacked]
sys.path.append(site)

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            return importlib.machinery.ModuleSpec(name, self)

    def create_module(self, spec):
        raise ModuleNotFoundError(f"{spec.name} is no core dependency", name=spec.name)

    def exec_module(self, module):
        pass

sys.meta_path.insert(0, Block())
import torch
import fp8, unit_scaling

x = torch.linspace(-1, 1, 4).reshape(2, 2)
with fp8.autocast("unit"):
    unit_scaling.Linear(2, 2)(x).sum().backward()
print(json.dumps([fp8.__file__, unit_scaling.__file__]))
"""


@proves("unit-scaling", "pip install")
def test_wheel_works_with_core_dependencies_alone(wheel, tmp_path):
    """In an interpreter that sees the wheel, torch, numpy, einops and what these need.

    -S: no .pth file of this environment is read, so that an editable install is out of reach.
    """
    zipfile.ZipFile(wheel).extractall(tmp_path)
    core = core_distributions()
    owners = metadata.packages_distributions()
    other = {
        name
        for name, dists in owners.items()
        if not core & {_name(dist) for dist in dists}
    }
    blocked = sorted(other - PACKAGES)
    assert "pytest" in blocked
    site = str(Path(torch.__file__).parent.parent)
    argument = json.dumps([str(tmp_path), site, blocked])
    files = python(IMPORT_ALONE, argument, flags=("-I", "-S"))
    assert all(Path(file).is_relative_to(tmp_path) for file in files)
