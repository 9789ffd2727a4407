"""The site: built without a warning, complete, and without anything loaded from elsewhere."""

import importlib
import os
import re
import sys

import pytest

from tests.launch import ROOT, ran
from tests.layers import LAYERS


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built with warnings (broken links, pages that nothing leads to) as errors."""
    for name in ("mkdocs", "material", "mkdocstrings_handlers.python"):
        pytest.importorskip(name, reason="the extra docs is not installed")
    folder = tmp_path_factory.mktemp("site")
    command = "-m mkdocs build --strict --quiet -d".split()
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    ran(sys.executable, *command, folder, env=env, timeout=250)
    return folder


def test_every_page_is_there(site):
    for path in (ROOT / "docs").rglob("*.md"):
        page = path.relative_to(ROOT / "docs").with_suffix(".html")
        assert (site / page).is_file(), f"{page} was not built"
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        text = (site / "notebooks" / path.with_suffix(".html").name).read_text(
            encoding="utf-8"
        )
        assert "data:image/png" in text, f"{path.name} has no figure"


def test_nothing_is_loaded_from_elsewhere(site):
    loading = re.compile(
        r'<(?:script|img|link rel="(?:stylesheet|preconnect)")[^>]*"https?://'
    )
    imported = re.compile(
        r"""(?:@import|\bimport\b[^\n;]*\bfrom|url\()\s*['"]?https?://"""
    )
    for path in site.rglob("*.html"):
        text = path.read_text()
        assert not loading.search(text), path.name
        assert not imported.search(text), path.name


def test_every_public_name_has_an_entry(site):
    from docs.reference import MODULES

    for name in MODULES:
        text = (site / "api" / f"{name}.html").read_text()
        names = set(importlib.import_module(name).__all__) - {"__version__"}
        public = {f"{name}.{one}" for one in names}
        missing = {one for one in public - set(MODULES) if f'id="{one}"' not in text}
        modules = {one for one in missing if one in sys.modules}
        assert missing == modules, f"without an entry: {sorted(missing - modules)}"


def test_the_reference_has_the_docstrings(site):
    """Also of functions that only the imported module has, and the rules of ops."""
    text = (site / "api" / "unit_scaling.functional.html").read_text()
    entry = text.partition('id="unit_scaling.functional.relu"')[2].partition("<h2")[0]
    assert "mult" in entry
    assert "Scale factors." in entry
    assert "quadrature" in entry


def test_the_reference_shows_docstrings_as_they_are_written(site):
    """Doctests are code, a sentence of several lines is one item, an attribute has its type."""
    for path in (site / "api").glob("*.html"):
        assert "<blockquote>" not in path.read_text(), path.name
    pages = ("fp8.lab.trace", "fp8.lab.preflight.findings")
    text = "".join((site / "api" / f"{page}.html").read_text() for page in pages)
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", "", text))  # of a no-break space, too
    assert "m, k, n (int) – sizes of the forward product" in text
    assert "snapshot step -&gt; update error" in text


def test_links_of_the_reference_lead_somewhere(site):
    for path in (site / "api").glob("*.html"):
        links = re.findall(
            r'href="((?:fp8|unit_scaling)[\w.]*\.html)#([\w.]+)"', path.read_text()
        )
        for page, anchor in set(links):
            assert f'id="{anchor}"' in (site / "api" / page).read_text(), (
                f"{path.name}: {anchor}"
            )


def test_the_architecture_names_every_folder():
    """In the order of the layers."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    for package in LAYERS:
        section = text.partition(f"## The folders of {package}\n")[2].partition(
            "\n## "
        )[0]
        listed = re.findall(
            r"`([\w/]+)`", "".join(re.findall(r"^\| (`.*?) \|", section, re.M))
        )
        layers = [
            name for name in LAYERS[package].split() if (ROOT / package / name).is_dir()
        ]
        assert [name for name in listed if name in layers] == layers
        folders = {path.parent for path in (ROOT / package).rglob("*.py")} - {
            ROOT / package
        }
        assert {path.relative_to(ROOT / package).as_posix() for path in folders} <= set(
            listed
        )
