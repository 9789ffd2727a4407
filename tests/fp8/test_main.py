import json
import re
import subprocess
import sys

import pytest

import fp8
from fp8 import FORMATS, LEVELS, RECIPES
from fp8.__main__ import TABLES, main


@pytest.mark.parametrize(
    ("command", "names"), [("formats", FORMATS), ("recipes", RECIPES), ("levels", LEVELS)]
)
def test_one_line_for_each_row(command, names, capsys):
    main([command])
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.startswith(TABLES[command][0][0])
    assert [line.split()[0] for line in lines] == list(names)


def test_what_a_line_says(capsys):
    main(["formats"])
    lines = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()}
    assert lines["e4m3"] == ["1/4/3", "7", "448", "0.015625", "0.00195312", "no", "yes", "yes"]
    main(["recipes"])
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert lines["tensor"].endswith(" e5m2, tensor")
    assert "e2m1, nv 16x16 " in lines["nvfp4"]
    assert lines["nvfp4"].endswith("grad_weight_input: e2m1, nv, rotated by 16")
    assert "grad_input_weight: e4m3, tensor; grad_weight_grad: -;" in lines["row_gw_hp"]


def test_what_a_level_is(capsys):
    main(["levels"])
    *_, line = capsys.readouterr().out.splitlines()
    cells = ["O3", "FP8", "FP8", "e4m3 + scale", "float16 + scale", "e4m3", "e4m3 + float16"]
    assert re.split("  +", line) == cells


def test_an_unknown_table_is_one_line_and_code_2(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["rounding"])
    assert exit.value.code == 2
    assert "invalid choice: 'rounding'" in capsys.readouterr().err


@pytest.mark.sampled(len(TABLES))
@pytest.mark.parametrize("command", TABLES)
def test_a_reader_that_has_gone(command):
    """As ``fp8 formats | head`` may leave it: no traceback, and no error in a pipeline."""
    run = [sys.executable, "-m", "fp8", command]
    process = subprocess.Popen(run, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    assert (process.stderr.read(), process.wait()) == ("", 0)
    process.stderr.close()


@pytest.mark.parametrize("command", TABLES)
def test_as_json(command, capsys):
    assert main([command, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    heads, cells = TABLES[command]
    assert [list(row.values()) for row in rows] == [list(row) for row in cells()]
    assert all(list(row) == heads for row in rows)
    if command == "formats":  # numbers are numbers
        row = next(r for r in rows if r["format"] == "e5m2")
        assert (row["max"], row["bias"], row["Inf"]) == (57344.0, 15, True)


def test_version(capsys):
    with pytest.raises(SystemExit) as done:
        main(["--version"])
    assert done.value.code == 0
    assert capsys.readouterr().out == f"fp8 {fp8.__version__}\n"
