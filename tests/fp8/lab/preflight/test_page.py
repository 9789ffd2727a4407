"""The page of a preflight: one file, complete, labelled, escaped, the same for equal findings."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
import sys
from typing import Any

import pytest

from fp8.lab.preflight.findings import Candidate, Choice, Findings, Run
from fp8.lab.preflight.page import page
from tests.fp8.lab.preflight.example_findings import HOSTILE, LAYERS, SNAPSHOTS, interrupted, rich

pytest.importorskip("jinja2")
matplotlib = pytest.importorskip("matplotlib")
bs4 = pytest.importorskip("bs4")

STATES = {"rich": rich, "empty": Findings, "interrupted": interrupted}
SECTIONS = "policies products frontier losses estimates code how notes versions".split()


def soup(findings: Findings) -> Any:
    return bs4.BeautifulSoup(page(findings), "html.parser")


@pytest.fixture(scope="module", params=STATES)
def each(request: pytest.FixtureRequest) -> Any:
    return soup(STATES[request.param]())


@pytest.fixture(scope="module")
def whole() -> Any:
    return soup(rich())


def text(element: Any) -> str:
    """Its text on one line, with a plain minus sign and plain spaces."""
    return " ".join(element.get_text().replace("−", "-").split())


def row(table: Any, name: str) -> list[str]:
    """The cells of the table's row of that name."""
    (found,) = [
        line
        for line in table.tbody.find_all("tr", recursive=False)
        if line.th and text(line.th).split(" details")[0].startswith(name)
    ]
    return [text(cell) for cell in found.find_all("td", recursive=False)]


# The document


def test_nothing_is_loaded(each):
    assert not each.find_all(["link", "img", "iframe", "object", "embed", "base"])
    assert not each.find_all(src=True)
    assert not each.find_all(style=re.compile(r"url\((?!#)"))
    assert "@import" not in each.style.string
    assert "url(" not in each.style.string
    links = {element[name] for name in ("href", "xlink:href") for element in each.select("*")
             if element.has_attr(name)}  # fmt: skip
    identifiers = [element["id"] for element in each.find_all(id=True)]
    assert links <= {f"#{name}" for name in identifiers}
    assert len(identifiers) == len(set(identifiers))
    references = re.findall(r"url\(#([^)]*)\)", str(each))
    assert set(references) <= set(identifiers)


def test_headings_are_in_order(each):
    levels = [int(heading.name[1]) for heading in each.find_all(re.compile("^h[1-6]$"))]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    assert [section.get("id") for section in each.main.find_all("section")] == [None, *SECTIONS]


def test_figures_and_tables_are_labelled(each):
    for svg in each.find_all("svg"):
        image = svg if svg.get("role") == "img" else svg.find_parent(role="img")
        assert len(image["aria-label"]) > 10
    for table in each.find_all("table"):
        assert text(table.caption)
        assert all(cell.get("scope") for cell in table.find_all("th"))
        region = table.find_parent(role="region")
        assert region["tabindex"] == "0"
        assert each.find(id=region["aria-labelledby"]) is table.caption
    assert each.html["lang"] == "en"
    assert each.find("a", class_="skip")["href"] == "#main"


def test_rows_of_a_table_have_equal_widths(each):
    def width(line: Any) -> int:
        return sum(
            int(cell.get("colspan", 1)) for cell in line.find_all(["td", "th"], recursive=False)
        )

    for table in each.find_all("table"):
        (first,) = table.thead.find_all("tr")
        for line in table.tbody.find_all("tr", recursive=False):
            assert width(line) == width(first)


def test_equal_findings_give_equal_pages():
    findings = rich()
    copy = Findings.from_dict(json.loads(json.dumps(findings.to_dict())))
    with matplotlib.rc_context({"lines.linewidth": 9, "font.size": 30, "svg.hashsalt": "x"}):
        assert page(copy) == page(findings)


def test_a_missing_library_names_the_extra(monkeypatch):
    for name in ("jinja2", "matplotlib"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, name, None)
            with pytest.raises(ImportError, match=rf"{name} is not installed.*\[preflight\]"):
                page(rich())


# What it shows


def test_all_findings_appear(whole):
    findings, shown = rich(), text(whole)
    names = set(LAYERS) | {run.name for run in findings.runs}
    names |= {value for item in findings.candidates for value in (item.name, item.outcome)}
    names |= {choice.name for choice in findings.choices if choice.measured is not None}
    names |= {estimate.hardware for estimate in findings.estimates}
    names |= {product.why_not for product in findings.products}
    names |= {*findings.verdict.code, *findings.seconds, *findings.settings, *findings.model}
    names |= {*findings.versions, *findings.versions.values()}
    names |= {*str(findings.verdict).splitlines(), *findings.notes}
    assert not {name for name in names if name not in shown}
    codes = [code.get_text() for code in whole.find_all("code")]
    assert codes[: len(findings.verdict.code)] == list(findings.verdict.code.values())
    assert json.loads(codes[-1]) == findings.verdict.policy


def test_ranking(whole):
    table = whole.find(id="policies").table
    assert text(table.caption).endswith("at step " + ", ".join(map(str, SNAPSHOTS)) + ".")
    cells = row(table, "mxfp8 except lm_head")
    assert cells == [
        "as the reference", "-0.0012[-0.0050, +0.0026]", "0.0280 / 0.0336 / 0.0392", "72 %", "3",
    ]  # fmt: skip
    assert row(table, "unit")[:2] == ["not trained", "–"]
    assert row(table, "e4m3")[1] == "∞"
    badges = table.find_all(class_="badge")
    assert [text(badge) for badge in badges] == ["recommended"]
    undecided = rich()
    undecided.verdict.recommended = False
    assert text(soup(undecided).find(class_="badge")) == "first to try"


def test_hidden_columns_of_a_narrow_screen_are_in_the_details_of_a_row(whole):
    details = text(whole.find(id="policies").tbody.find("details").div)
    for part in ("of the FLOPs are cast", "pairs of runs", "In high precision"):
        assert part in details


def test_the_verdict_comes_first_with_its_command():
    """And terms are explained beside it."""
    findings = rich()
    findings.verdict.answer = (
        "Not decided: run 3 more minutes with this command: fp8 preflight a.py"
    )
    section = soup(findings).main.section
    assert (
        text(section.find(class_="answer")) == "Not decided: run 3 more minutes with this command:"
    )
    assert text(section.code) == "fp8 preflight a.py"
    assert [text(title) for title in section.find_all("h3")] == ["What it saves", "Why"]
    assert {"Recipe", "Gap", "FP8, e4m3, e5m2"} <= {text(term) for term in section.find_all("dt")}


def test_estimates_are_called_estimates(whole):
    section = whole.find(id="estimates")
    assert "Estimates from a roofline model, not measurements." in text(section)
    assert all("stimate" in text(table.caption) for table in section.find_all("table"))
    table = section.table
    h100 = rich().estimates[0]
    cells = row(table, "h100")
    assert cells[-4:] == [f"{h100.speedup:.2f}×", "3 of 13", "1 GB", "2 GB"]
    assert row(table, "h200")[-1] == "not run: it has no MX formats"


def test_selections_are_listed(whole):
    section = whole.find(id="frontier")
    assert "Chosen: keep 1 (mxfp8), which casts 72 % of the FLOPs" in text(section)
    assert [text(badge) for badge in section.find_all(class_="badge")] == ["chosen"]
    measured = [choice for choice in rich().choices if choice.measured is not None]
    assert len(section.tbody.find_all("tr")) == len(measured)


# Text from outside


def test_names_are_escaped(whole):
    assert text(whole).count(HOSTILE) > 3
    assert len(whole.find_all("script")) == 1
    assert not whole.main.find_all("b")


# What is not there


def test_empty_findings_say_what_was_not_measured():
    empty = soup(Findings())
    assert not empty.find_all(["svg", "table", "figure", "pre"])
    for name in SECTIONS:
        assert re.search(r"Not measured|None|No ", text(empty.find(id=name))), name
    assert "Not decided" in text(empty.main.section)


def test_interrupted_findings_show_what_there_is():
    ended = soup(interrupted())
    assert "Interrupted in the reference run." in text(ended.find(id="notes"))
    table = ended.find(id="policies").table
    assert row(table, "mxfp8 except")[:2] == ["not trained", "–"]
    assert [text(key) for key in ended.find(id="losses").find_all("li")] == ["reference"]
    for name in ("frontier", "estimates"):
        assert "Not measured" in text(ended.find(id=name))


def test_values_that_are_not_finite():
    nan, inf = math.nan, math.inf
    findings = Findings(
        candidates=[Candidate("a", "r", errors={1: nan, 2: inf}, gap=nan)],
        choices=[Choice("a", "r", [], 0.5, inf, nan), Choice("b", "r", [], 0.5, 0.0)],
        runs=[Run("reference", 0, [nan, inf], nan), Run("a", 0, [], inf)],
    )
    shown = soup(findings)
    cells = row(shown.find(id="policies").table, "a")
    assert cells == ["not trained", "NaN", "NaN / ∞", "100 %", "0"]
    assert not shown.find_all("svg")
    assert "no run has a finite loss" in text(shown.find(id="losses"))
    assert row(shown.find(id="losses").table, "reference")[1:4] == ["2", "∞", "NaN"]


@pytest.mark.parametrize(
    "losses",
    [
        {"a": [2.0, 1.0]},
        {"reference": [2.0, 2.0], "a": [2.0, 2.0]},
        {"reference": [2.0, 1.0, math.nan], "a": [math.nan, 1.0]},
        {"reference": [3.0] * 5000, "a": [2.0] * 300},
    ],
    ids=["no reference", "equal", "unequal lengths", "long"],
)
def test_losses_of_any_length_are_drawn(losses):
    runs = [Run(name, 0, values, values[-1]) for name, values in losses.items()]
    shown = soup(Findings(runs=runs)).find(id="losses")
    assert [text(key) for key in shown.find_all("li")] == list(losses)
    assert "NaN" not in str(shown.svg)
    assert len(str(shown.svg)) < 60_000


# Colours


def themes() -> list[dict[str, str]]:
    """The colours of each theme, by the names of their variables."""
    parts = page(Findings()).split("prefers-color-scheme: dark", 1)
    return [dict(re.findall(r"--([\w-]+): (#\w{6})", part)) for part in parts]


def contrast(one: str, other: str) -> float:
    """Web Content Accessibility Guidelines 2.2, definition of contrast ratio."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted([luminance(one), luminance(other)])
    return (high + 0.05) / (low + 0.05)


def test_text_and_lines_stand_out():
    """WCAG 2.2, success criteria 1.4.3 (text, 4.5) and 1.4.11 (graphics, 3)."""
    light, dark = themes()
    assert light.keys() == dark.keys()
    for colours in (light, dark):
        for name in ("ink", "soft", "link"):
            assert contrast(colours[name], colours["paper"]) >= 4.5, name
        assert contrast(colours["ink"], colours["panel"]) >= 4.5
        for name in [name for name in colours if name.startswith("series-")]:
            assert contrast(colours[name], colours["paper"]) >= 3, name


def test_the_example_fills_every_part():
    """A new part of the findings needs a place on the page, and one in the example."""
    filled = rich()
    assert all(getattr(filled, field.name) for field in dataclasses.fields(Findings))
