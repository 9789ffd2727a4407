"""Reports: their text, rows that were left alone, notes, and numbers for JSON."""

import math

from torch import nn

from fp8.common.report import LEFT_ALONE, Report, Row, finite, note, notes_on

ROWS = [
    Row("", "Linear", "converted", "row"),
    Row("norm", "LayerNorm", LEFT_ALONE, "a norm"),
]
TEXT = """\
module   type       done        why
(model)  Linear     converted   row
norm     LayerNorm  left alone  a norm

a note
1 converted, 1 left alone"""


def test_a_report_is_a_table_with_notes_and_counts():
    report = Report(ROWS, ["a note"])
    assert str(report) == repr(report) == TEXT
    assert report.left_alone == ROWS[1:]
    assert str(Report([], heading="norm")) == "module  norm  done  why\n"


def test_notes_are_kept_on_the_model_in_order():
    model = nn.Linear(2, 2)
    assert notes_on(model) == ()
    for line in ("first", "second"):
        note(model, line)
    assert notes_on(model) == ("first", "second")


def test_what_is_not_finite_is_none_in_json():
    assert finite({"a": [1.5, math.nan], "b": -math.inf}) == {
        "a": [1.5, None],
        "b": None,
    }
