"""`fp8 doctor`: devices, recipes and libraries, and an exit code."""

import json

import torch

from fp8 import RECIPES
from fp8.__main__ import main
from fp8.common.libraries import LIBRARIES, Found
from fp8.kernels import product as native
from fp8.lab import doctor

NATIVE = 'native if backend="native" requests it: "auto" simulates on CPUs'
BROKEN = Found("broken", "1.0", "RuntimeError: no library", None, RuntimeError())
FOUND = Found("found", "1.0", "", object(), None)
MISSING = Found("missing", "", "not installed", None, ImportError())


def say(monkeypatch, **found):
    monkeypatch.setattr(doctor, "probe", lambda name: found.get(name, FOUND))


def test_every_recipe_and_library_has_a_row(monkeypatch, capsys):
    say(monkeypatch, composer=MISSING)
    assert main(["doctor", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)
    assert list(findings) == "system devices recipes libraries".split()
    assert {"what": "torch", "version": torch.__version__} in findings["system"]
    cpu = {row["recipe"]: row for row in findings["recipes"] if row["device"] == "cpu"}
    assert list(cpu) == list(RECIPES)
    assert {row["runs"] for row in cpu.values()} == {"simulated"}
    why_not = native.why_not_device(torch.device("cpu"))
    assert cpu["unit"]["why"] == (why_not or NATIVE)
    assert cpu["bf16"]["why"].startswith("no kernel multiplies bf16 by bf16")
    rows = {row["library"]: row for row in findings["libraries"]}
    assert list(rows) == list(LIBRARIES)
    assert rows["composer"]["to get it"] == LIBRARIES["composer"].get
    assert rows["torchao"]["to get it"] == ""


def test_exit_code_is_1_for_what_is_broken_only(monkeypatch, capsys):
    say(monkeypatch, transformer_engine=BROKEN)
    assert main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.startswith("transformer_engine")]
    assert "broken  1.0" in line
    assert "RuntimeError: no library" in line
    assert LIBRARIES["transformer_engine"].get in line
    say(monkeypatch, **dict.fromkeys(LIBRARIES, MISSING))
    assert main(["doctor"]) == 0


def test_a_device_without_fp8_simulates_and_says_why(monkeypatch):
    say(monkeypatch)
    device = torch.device("cuda", 0)
    monkeypatch.setattr(doctor, "_devices", lambda: [device])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    findings = doctor.examine()
    (row,) = findings["devices"]
    assert row["name"] == "NVIDIA A100"
    assert row["capability"] == "8.0"
    assert row["FP8 product"] == "no: compute capability 8.0, FP8 needs 8.9"
    assert {row["runs"] for row in findings["recipes"]} == {"simulated"}
