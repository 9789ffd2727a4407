"""docs/tables.md says what the code says, docs/benchmarks.md what was measured."""

from docs import build


def test_tables_are_up_to_date():
    assert build.TABLES.read_text(encoding="utf-8") == build.render(), "run `make docs`"


def test_benchmarks_are_up_to_date():
    assert build.BENCHMARKS.read_text(encoding="utf-8") == build.render_benchmarks(), (
        "run `make docs`"
    )


def test_every_row_is_there():
    text = build.render()
    tables = (build.FORMATS, build.RECIPES, build.SCALINGS, build.RULES, build.LEVELS)
    for table in (*tables, build.CONSTRAINTS, build.LR_RULES):
        assert all(f"| `{name}` |" in text for name in table)
    assert all(f"| `U.{name}` |" in text for name in build.OPS)
