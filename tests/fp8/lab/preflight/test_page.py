"""The page of a preflight: one file, complete, labelled, escaped, the same for equal findings."""

import dataclasses
import itertools
import json
import re
import sys

import pytest
from bs4 import BeautifulSoup

from fp8.lab.preflight.findings import Findings
from fp8.lab.preflight.page import page
from tests.fp8.lab.preflight.example_findings import (
    HOSTILE,
    SNAPSHOTS,
    interrupted,
    rich,
)

STATES = {"rich": rich, "empty": Findings, "interrupted": interrupted}
SECTIONS = "policies time code how".split()


def soup(findings):
    return BeautifulSoup(page(findings), "html.parser")


@pytest.fixture(scope="module", params=STATES)
def each(request):
    return soup(STATES[request.param]())


@pytest.fixture(scope="module")
def whole():
    return soup(rich())


def text(element):
    """Its text on one line."""
    return " ".join(element.get_text().split())


def row(table, name):
    """The cells of the table's row of that name."""
    (found,) = [
        line
        for line in table.tbody.find_all("tr", recursive=False)
        if line.th and text(line.th).split(" details")[0].startswith(name)
    ]
    return [text(cell) for cell in found.find_all("td", recursive=False)]


# The document


def test_nothing_is_loaded(each):
    assert not each.find_all("link img iframe object embed base a".split())
    assert not each.find_all(src=True)
    assert "@import" not in each.style.string
    assert "url(" not in str(each)
    identifiers = [element["id"] for element in each.find_all(id=True)]
    assert len(identifiers) == len(set(identifiers))


def test_headings_figures_and_tables_can_be_read_out(each):
    levels = [int(heading.name[1]) for heading in each.find_all(re.compile("^h[1-6]$"))]
    assert levels[0] == 1
    assert all(1 < after <= before + 1 for before, after in itertools.pairwise(levels))
    assert [section.get("id") for section in each.main.find_all("section")] == [
        None,
        *SECTIONS,
    ]
    for table in each.find_all("table"):
        assert text(table.caption)
        assert all(cell.get("scope") for cell in table.find_all("th"))
        region = table.find_parent(role="region")
        assert region["tabindex"] == "0"
        assert each.find(id=region["aria-labelledby"]) is table.caption
    assert each.html["lang"] == "en"


def test_a_missing_library_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ImportError, match=r"jinja2 is not installed.*\[preflight\]"):
        page(rich())


# What it shows


def test_what_decides_appears(whole):
    findings, shown = rich(), text(whole)
    names = {
        value for item in findings.candidates for value in (item.name, item.outcome)
    }
    names |= {forecast.hardware for forecast in findings.forecasts}
    names |= {
        *findings.verdict.code,
        *findings.settings,
        *findings.model,
        *findings.versions,
    }
    names |= {*findings.versions.values(), findings.not_forecast}
    names |= {*str(findings.verdict).splitlines(), *findings.notes}
    assert not {name for name in names if name not in shown}
    codes = [code.get_text() for code in whole.find_all("code")]
    assert codes[:-1] == list(findings.verdict.code.values())
    assert json.loads(codes[-1]) == findings.verdict.policy


def test_ranking(whole):
    table = whole.find(id="policies").table
    assert text(table.caption).endswith(
        "at step " + ", ".join(map(str, SNAPSHOTS)) + "."
    )
    cells = row(table, "mxfp8 except lm_head")
    assert cells == [
        "as the reference", "-0.0012[-0.0050, +0.0026]", "0.028 / 0.0336 / 0.0392", "72%", "3",
    ]  # fmt: skip
    assert row(table, "unit")[:2] == ["not trained", "–"]
    assert row(table, "e4m3")[1] == "+inf"
    badges = table.find_all(class_="badge")
    assert [text(badge) for badge in badges] == ["recommended"]
    undecided = rich()
    undecided.verdict.recommended = False
    assert text(soup(undecided).find(class_="badge")) == "first to try"


def test_the_verdict_comes_first_with_its_command():
    """And terms are explained beside it."""
    findings = rich()
    findings.verdict.answer = (
        "Not decided: run 3 more minutes with this command: fp8 preflight a.py"
    )
    section = soup(findings).main.section
    assert (
        text(section.find(class_="answer"))
        == "Not decided: run 3 more minutes with this command:"
    )
    assert text(section.code) == "fp8 preflight a.py"
    assert [text(title) for title in section.find_all("h3")] == [
        "What it saves",
        "Why",
        "Notes",
    ]
    assert {"Recipe", "Gap", "FP8, e4m3, e5m2", "Estimate, forecast"} <= {
        text(term) for term in section.find_all("dt")
    }


def test_estimates_are_called_estimates(whole):
    section = whole.find(id="time")
    assert "From rates that are published, not measured." in text(section)
    rows = [
        [text(cell) for cell in line.find_all(["th", "td"])]
        for line in section("tr")[1:]
    ]
    name = "mxfp8 except lm_head"
    assert rows[1] == ["h100, estimate", name, "1.53 ms", "0.76", "1 of 2", "1 GB"]
    assert rows[3] == ["h200, estimate", name, "not run: it has no MX formats"]
    assert rows[-1][0] == "b200, forecast"


# Text from outside


def test_names_are_escaped(whole):
    assert HOSTILE in text(whole)
    assert not whole.find_all(["script", "b"])


# What is not there


def test_empty_findings_say_what_was_not_measured():
    empty = soup(Findings())
    assert not empty.find_all(["table", "pre"])
    for name in SECTIONS:
        assert "Not measured" in text(empty.find(id=name)) or name == "how"
    assert "Not decided" in text(empty.main.section)


def test_interrupted_findings_show_what_there_is():
    ended = soup(interrupted())
    assert "Interrupted in the reference run." in text(ended.main.section)
    table = ended.find(id="policies").table
    assert row(table, "mxfp8 except")[:2] == ["not trained", "–"]
    assert "Not measured" in text(ended.find(id="time"))


def test_the_example_fills_every_part():
    """A new part of the findings needs a place on the page, and one in the example."""
    filled = rich()
    assert all(getattr(filled, field.name) for field in dataclasses.fields(Findings))
