"""Problems from files, and the command line."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import fp8
from fp8.__main__ import main
from fp8.lab.setups import from_function
from tests.shared import parametrize, refuses

SOURCE = """
import torch
from helper_of_train import width


def setup(seed):
    model = torch.nn.Linear(width, 16)
    data = [torch.randn(64, width) for _ in range(30)]
    return model, data, lambda y: (y - 1).square().mean()


number = 3
"""


@pytest.fixture
def train_py(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "helper_of_train.py").write_text("width = 16\n")
    (tmp_path / "train_of_user.py").write_text(SOURCE)
    return tmp_path


def test_a_function_of_a_file_that_imports_its_neighbours(train_py):
    model, data, _ = from_function("train_of_user.py:setup")(seed=0)
    assert model.in_features == 16
    assert len(data) == 30


@parametrize(
    "name, error, message",
    [
        ("train_of_user.py", ValueError, "give a file and a function"),
        (":setup", ValueError, "give a file and a function"),
        ("missing.py:setup", ValueError, "no file"),
        ("no_such_module:setup", ValueError, "no module"),
        ("train_of_user.py:other", ValueError, "has no 'other'"),
        ("train_of_user.py:number", TypeError, "is a int, not a function"),
    ],
)
def test_bad_names(train_py, name, error, message):
    with refuses(message, error):
        from_function(name)


def test_the_command_writes_a_page_and_figures(train_py, capsys):
    code = main(
        "preflight train_of_user.py:setup --steps 6 --budget 100 --seeds 1 --recipes row mxfp4 "
        "--out out/a.html --quiet".split()
    )
    assert code == 0
    printed = capsys.readouterr().out
    assert "written: out/a.json, out/a.html" in printed
    command = printed.splitlines()[0].partition("this command: ")[2].split()
    assert command[:4] == "fp8 preflight train_of_user.py:setup --steps".split()
    assert command[command.index("--recipes") :][:3] == ["--recipes", "row", "mxfp4"]
    assert "--resume" in command
    figures = json.loads((train_py / "out" / "a.json").read_text())
    assert figures["products"][0]["layer"] == "(model)"
    assert main([*command[1:], "--seeds", "2"]) == 0
    capsys.readouterr()
    other = (
        "preflight train_of_user.py:setup --steps 6 --resume --out out/a.html --quiet"
    )
    assert main(other.split()) == 1
    assert "of another preflight: its recipes is" in capsys.readouterr().err


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_sigterm_keeps_the_figures_and_writes_the_page(train_py):
    """In the middle of the training, which would take an hour."""
    (train_py / "slow.py").write_text(SLOW)
    command = [
        sys.executable,
        "-m",
        "fp8",
        "preflight",
        "slow.py:setup",
        "--budget",
        "3600",
    ]
    root = str(Path(fp8.__file__).parents[1])
    process = subprocess.Popen(
        [*command, "--seeds", "1000", "--steps", "4", "--target", "1e-9"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": root},
    )
    figures = train_py / "preflight.json"
    end = time.monotonic() + 250
    while time.monotonic() < end and process.poll() is None:
        if figures.exists() and len(json.loads(figures.read_text())["runs"]) > 2:
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    printed, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM, errors
    assert "Traceback" not in errors
    assert errors == ""  # no bars without a terminal
    assert printed.startswith("Not decided: run ")
    assert "interrupted" in json.loads(figures.read_text())["notes"][-1]
    assert "interrupted" in (train_py / "preflight.html").read_text()


SLOW = """
import time
import torch


class Slow(torch.nn.Linear):
    def forward(self, x):
        time.sleep(0.005)
        return super().forward(x)


def setup(seed):
    return Slow(16, 16), [torch.randn(4, 16) for _ in range(20)], lambda y: y.square().mean()
"""


@parametrize(
    "arguments, code, message",
    [
        ("missing.py:setup", 2, "no file"),
        ("--demo --recipes mxfp5", 2, "unknown recipe"),
        ("--demo --budget 0", 2, "budget must be a positive number"),
        ("broken.py:setup --quiet", 1, "batches ran out"),
        ("raising.py:setup --quiet", 1, "preflight: boom (ValueError at "),
    ],
)
def test_bad_commands(train_py, capsys, arguments, code, message):
    broken = "import torch\ndef setup():\n    return torch.nn.Linear(4, 4), []\n"
    (train_py / "broken.py").write_text(broken)
    raising = "def setup():\n    raise ValueError('boom')\n"
    (train_py / "raising.py").write_text(raising)
    assert main(["preflight", *arguments.split()]) == code
    assert message in capsys.readouterr().err
