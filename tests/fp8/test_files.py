"""Checkpoint files: whole or absent, refused with their name when a bit has changed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fp8.files import CheckpointError, load_checkpoint, save_checkpoint, write_atomically
from tests.launch import ROOT

STATE = {"weight": torch.arange(300.0), "step": 3, "names": ["a", None], "bf16": torch.ones(2)}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_checkpoint(STATE, tmp_path / "model.pt")
    return tmp_path / "model.pt"


def test_what_is_saved_is_loaded(saved: Path):
    for state in (load_checkpoint(saved), torch.load(saved, weights_only=True)):
        assert torch.equal(state["weight"], STATE["weight"])
        assert (state["step"], state["names"]) == (3, ["a", None])
    assert os.listdir(saved.parent) == ["model.pt"]


def test_every_flipped_bit_and_every_cut_is_refused(saved: Path):
    content = saved.read_bytes()
    positions = range(0, len(content), 13)
    for position in positions:
        damaged = bytearray(content)
        damaged[position] ^= 1 << position % 8
        saved.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"model.pt: (damaged|cut short)"):
            load_checkpoint(saved)
    for size in (0, 1, 70, 71, len(content) // 2, len(content) - 1):
        saved.write_bytes(content[:size])
        with pytest.raises(CheckpointError, match=r"model.pt: (damaged|cut short)"):
            load_checkpoint(saved)
    saved.write_bytes(content)
    load_checkpoint(saved)


def test_other_files_are_refused(tmp_path: Path):
    path = tmp_path / "other.pt"
    torch.save(STATE, path)
    with pytest.raises(CheckpointError, match=r"other.pt: .* does not end in a hash"):
        load_checkpoint(path)
    save_checkpoint([1, 2], path)
    with pytest.raises(CheckpointError, match=r"other.pt: holds a list, not a dict"):
        load_checkpoint(path)
    save_checkpoint({"model": torch.nn.Linear(2, 2)}, path)
    with pytest.raises(CheckpointError, match=r"other.pt: cannot be loaded: Weights only"):
        load_checkpoint(path)
    with pytest.raises(FileNotFoundError):
        load_checkpoint(tmp_path / "none.pt")


def test_a_write_that_fails_leaves_the_old_file_alone(saved: Path):
    before = saved.read_bytes()

    def fail(file) -> None:
        file.write(b"half of it")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(saved, fail)
    assert saved.read_bytes() == before
    assert os.listdir(saved.parent) == ["model.pt"]


KILLED = """
import os, signal, sys, torch
from fp8.files import save_checkpoint
path, moment = sys.argv[1:]
save_checkpoint({"step": 1, "x": torch.ones(1000)}, path)
def die(*args): os.kill(os.getpid(), signal.SIGKILL)
if moment == "writing":
    torch.save = lambda state, file: (file.write(b"PK half of a file"), file.flush(), die())
elif moment == "synced":
    os.replace = die
elif moment == "renamed":
    replace = os.replace
    os.replace = lambda *paths: (replace(*paths), die())
save_checkpoint({"step": 2, "x": torch.ones(1000)}, path)
"""


@pytest.mark.parametrize(("moment", "step"), [("writing", 1), ("synced", 1), ("renamed", 2)])
def test_killed_while_writing(tmp_path: Path, moment: str, step: int):
    path = tmp_path / "model.pt"
    command = [sys.executable, "-c", KILLED, str(path), moment]
    process = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=100)
    assert process.returncode == -signal.SIGKILL
    assert load_checkpoint(path)["step"] == step
    save_checkpoint({"step": 3}, path)  # over what was left behind
    assert load_checkpoint(path) == {"step": 3}
    assert os.listdir(tmp_path) == ["model.pt"]
