"""The changelog names every public name of an earlier commit that is not here any more."""

import re
from pathlib import Path

from tests.public_names import GONE, TABLES, documented, is_here, public, read

ROOT = Path(__file__).parents[1]
REMOVED = (ROOT / "CHANGELOG.md").read_text().partition("### Removed and moved")[2]
CODE = re.findall(r"`([^`]+)`", REMOVED)


def is_named(name, text=REMOVED, code=CODE):
    """Whether a text names what `public` lists: a module or one that it was part of by its path; a
    key of a table in quotes, or a format as code; else a name as a word in code."""
    kind, _, last = name.rpartition(" ")
    if kind == "module":
        parts = last.split(".")
        paths = {".".join(parts[:n]) for n in range(2, len(parts) + 1)}
        gone = {path for path in paths if not is_here(f"module {path}", set())}
        return any(
            path in re.findall(r"[\w.]+", each) for path in gone for each in code
        )
    if kind:
        return f'"{last}"' in text
    word = rf"(?<!\w){re.escape(name.rpartition('.')[2])}(?!\w)"
    return any(re.search(word, each) for each in code)


def test_every_name_that_went_is_in_the_changelog():
    now = public(documented(ROOT))
    names = read()
    assert len(names) > 20
    assert not [name for name in names if is_named(name, "", [])]
    missing = [name for name in names if not (is_here(name, now) or is_named(name))]
    assert not missing, f"the table of what was removed lacks {missing}"


def test_tables_are_read():
    found = public(documented(ROOT))
    for kind in TABLES.values():
        assert any(name.startswith(f"{kind} ") for name in found), kind
    assert {
        "recipe tensor",
        "rounding nearest",
        "fp8.optim.AdamW",
        "module fp8.optim",
    } <= found


def test_the_list_is_small():
    assert GONE.stat().st_size < 10_000
