"""The site is built without a warning, and the API reference has every public name."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built with warnings (broken links, pages that nothing leads to) as errors."""
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    pytest.importorskip("material", reason="the extra docs is not installed")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(folder)]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_is_there(site: Path):
    for path in (ROOT / "docs").rglob("*.md"):
        page = path.relative_to(ROOT / "docs").with_suffix(".html")
        assert (site / page).is_file(), f"{page} was not built"


def test_nothing_is_loaded_from_elsewhere(site: Path):
    loading = re.compile(r'<(?:script|img|link rel="(?:stylesheet|preconnect)")[^>]*"https?://')
    for path in site.rglob("*.html"):
        assert not loading.search(path.read_text(encoding="utf-8")), path.name


def test_every_public_name_has_an_entry(site: Path):
    from docs.api import MODULES

    for name in MODULES:
        text = (site / "api" / f"{name}.html").read_text(encoding="utf-8")
        names = set(importlib.import_module(name).__all__) - {"__version__"}
        public = {f"{name}.{one}" for one in names}
        missing = {one for one in public - set(MODULES) if f'id="{one}"' not in text}
        modules = {one for one in missing if one in sys.modules}
        assert missing == modules, f"without an entry: {sorted(missing - modules)}"


def test_links_of_the_reference_lead_somewhere(site: Path):
    for path in (site / "api").glob("*.html"):
        links = re.findall(r'href="((?:fp8|unit_scaling)[\w.]*\.html)#([\w.]+)"', path.read_text())
        for page, anchor in set(links):
            assert f'id="{anchor}"' in (site / "api" / page).read_text(), f"{path.name}: {anchor}"


def test_the_reference_does_not_say_where_it_was_made(site: Path):
    for path in (site / "api").glob("*.html"):
        text = path.read_text(encoding="utf-8")
        assert " at 0x" not in text
        assert str(ROOT) not in text
