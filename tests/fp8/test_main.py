import subprocess
import sys

import pytest

import fp8
from fp8.__main__ import main


def test_an_unknown_command_is_one_line_and_code_2(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["rounding"])
    assert exit.value.code == 2
    assert "invalid choice: 'rounding'" in capsys.readouterr().err


GONE = """
from fp8 import __main__ as program
program.doctor.run = lambda options: ("findings", 1)  # without a look at every library
raise SystemExit(program.main(["doctor"]))
"""


def test_a_reader_that_has_gone():
    """As ``fp8 doctor | head`` may leave it: no traceback, and the code of the command."""
    run = [sys.executable, "-c", GONE]
    process = subprocess.Popen(
        run, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stdout.close()
    assert (process.stderr.read(), process.wait()) == ("", 1)
    process.stderr.close()


def test_version(capsys):
    with pytest.raises(SystemExit) as done:
        main(["--version"])
    assert done.value.code == 0
    assert capsys.readouterr().out == f"fp8 {fp8.__version__}\n"
