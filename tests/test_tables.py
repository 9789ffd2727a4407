"""The generated files of docs/ and the README are up to date: tables, benchmarks, figures."""

import re
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

from docs import build, demo, figures, parity, questions
from docs.features import COMPARISONS, DOCUMENTS, FEATURES, FIELD, HOW, PEERS
from notebooks.nanogpt.settings import PRESETS
from notebooks.nanogpt.variants import VARIANTS
from tests.shared import parametrize

PAGES = sorted(Path(build.__file__).parent.glob("*.md"))


@parametrize("path", build.GENERATED, ids=lambda path: path.name)
def test_generated_files_are_up_to_date(path):
    assert path.read_text() == build.GENERATED[path](), "run `make docs`"


def test_rows_of_a_table_have_its_columns():
    """A bar in a cell that is not in code would begin another one."""
    for page in PAGES:
        text = re.sub(r"`[^`\n]*`", "", page.read_text())
        rows = [
            pair
            for pair in pairwise(text.split("\n"))
            if all(x.startswith("|") for x in pair)
        ]
        assert [b for a, b in rows if a.count("|") != b.count("|")] == [], page.name


def test_every_study_has_a_question():
    assert sorted(questions.QUESTIONS) == questions.studies()
    sizes = [path.stat().st_size for path in questions.RESULTS.iterdir()]
    assert sum(sizes) <= 300_000


def test_the_readme_says_what_the_demo_has_found():
    """Without scales FP8 hardly learns; with one per tensor, or unit-scaled, it does."""
    for row in demo.results("demo")["rows"]:
        variant = VARIANTS[row["name"]]
        assert (row["label"], row["lr"]) == (
            variant.label,
            variant.default_lr(PRESETS["small"]),
        )
        assert row["gap"] > 0.3 if row["name"] == "fp8" else row["gap"] < 0.05


# Figures


def test_every_figure_is_shown_and_none_is_left_over():
    assert {path.stem for path in figures.FOLDER.iterdir()} == set(figures.FIGURES)
    text = "".join(page.read_text() for page in PAGES)
    assert not [name for name in figures.FIGURES if f"(figures/{name}.svg)" not in text]


@parametrize("name", figures.FIGURES)
def test_figures_are_drawn_for_light_and_dark(name):
    """Well-formed, with colours in the variables of the style alone, and nothing outside."""
    root = ElementTree.fromstring(figures.FIGURES[name]())
    space = "{http://www.w3.org/2000/svg}"
    assert "prefers-color-scheme:dark" in root.findtext(f"{space}style", "")
    height = float(root.attrib["height"])
    for part in root.iter():
        assert not part.attrib.keys() & {"fill", "stroke", "style"}
        if part.tag == f"{space}rect":
            x, y, w, h = (float(part.attrib[key]) for key in "x y width height".split())
            assert 0 <= x <= x + w <= figures.WIDTH
            assert 0 <= y <= y + h <= height


# Parity

#: (system, feature) -> what is said of it beside its tests, for all rows of docs/parity.md.
NOTES = {
    **{(feature.system, feature.name): feature.note for feature in FEATURES},
    **{(FIELD, row.name): row.note for row in COMPARISONS},
}


def test_every_feature_has_a_test_or_a_reason_and_every_mark_a_feature():
    found = list(parity.proofs())
    shown = {(proof.system, proof.feature) for proof in found}
    assert len(NOTES) == len(FEATURES) + len(COMPARISONS)
    assert {feature.system for feature in FEATURES} == DOCUMENTS.keys()
    assert not shown - NOTES.keys()
    assert not [key for key, note in NOTES.items() if key not in shown and not note]
    assert {proof.how for proof in found} <= HOW.keys()
    for row in COMPARISONS:
        cells = parity.comparison(row, found)
        assert row.peers.keys() <= PEERS.keys()
        assert len(cells) == len(PEERS) + 2
        assert all(cells)
        assert not any("|" in cell for cell in cells)
