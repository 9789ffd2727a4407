"""Checkpoint files: whole or absent, refused with their name when a bit has changed."""

import errno
import hashlib
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch

import fp8
from fp8.checkpoints.files import (
    CheckpointError,
    load_checkpoint,
    save_checkpoint,
    write_atomically,
)
from tests.launch import ROOT, run_processes

STATE = {"weight": torch.arange(300.0), "step": 3, "names": ["a", None], "bf16": torch.ones(2)}


def save_unchecked(state: object, path: Path) -> None:
    """A file as `save_checkpoint` writes them, of a state that it refuses."""
    torch.save(state, path)
    content = path.read_bytes()
    path.write_bytes(content + b"sha256:" + hashlib.sha256(content).hexdigest().encode())


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
    save_unchecked([1, 2], path)
    with pytest.raises(CheckpointError, match=r"other.pt: holds a list, not a dict"):
        load_checkpoint(path)
    save_unchecked({"model": torch.nn.Linear(2, 2)}, path)
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


KILLED = Path(__file__).with_name("killed_writer.py")


@pytest.mark.parametrize(("moment", "step"), [("writing", 1), ("synced", 1), ("renamed", 2)])
def test_killed_while_writing(tmp_path: Path, moment: str, step: int):
    path = tmp_path / "model.pt"
    ((code, printed),) = run_processes(KILLED, [[str(path), moment]], [{}])
    assert code == -signal.SIGKILL, printed
    assert load_checkpoint(path)["step"] == step
    save_checkpoint({"step": 3}, path)  # over what was left behind
    assert load_checkpoint(path) == {"step": 3}
    assert os.listdir(tmp_path) == ["model.pt"]


WRITER = """
import itertools, sys, torch
from fp8.checkpoints.files import save_checkpoint
path, writer = sys.argv[1], int(sys.argv[2])
for i in itertools.count():
    save_checkpoint({"writer": writer, "i": i, "x": torch.full((20_000,), writer * 1e6 + i)}, path)
"""


def python(code: str, *arguments: object, stdout: int | None = None) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stdout=stdout, stderr=subprocess.PIPE)


def test_two_writers_that_are_killed_leave_a_whole_file(tmp_path: Path):
    """Every load while they write is of one writer's file, and so is the last; the next write
    removes what they left."""
    path = tmp_path / "model.pt"
    save_checkpoint({"writer": 0, "i": 0, "x": torch.zeros(20_000)}, path)
    writers, seen = [python(WRITER, path, number) for number in (1, 2)], set()
    deadline = time.monotonic() + 60
    while any(sum(writer == w for w, _ in seen) < 30 for writer in (1, 2)):
        assert time.monotonic() < deadline, seen
        state = load_checkpoint(path)
        assert (state["x"] == state["writer"] * 1e6 + state["i"]).all()
        seen.add((state["writer"], state["i"]))
    for writer in writers:
        writer.kill()
        assert writer.wait() == -signal.SIGKILL
        writer.stderr.close()
    load_checkpoint(path)
    save_checkpoint(STATE, path)
    assert os.listdir(tmp_path) == ["model.pt"]


def test_threads_that_write_one_path(tmp_path: Path):
    path, errors = tmp_path / "model.pt", []

    def write(value: int) -> None:
        try:
            for _ in range(20):
                save_checkpoint({"x": torch.full((1000,), value)}, path)
                assert len(set(load_checkpoint(path)["x"].tolist())) == 1
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert os.listdir(tmp_path) == ["model.pt"]


def test_a_link_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Neither one of the fixed name of earlier versions nor one of a name that is drawn."""
    target, path = tmp_path / "precious", tmp_path / "model.pt"
    target.write_text("precious")
    (tmp_path / "model.pt.tmp").symlink_to(target)
    (tmp_path / f"model.pt.{'0' * 16}.tmp").symlink_to(target)
    save_checkpoint(STATE, path)
    monkeypatch.setattr("secrets.token_hex", lambda size: "0" * 2 * size)
    with pytest.raises(FileExistsError):
        save_checkpoint(STATE, path)
    assert target.read_text() == "precious"
    assert (tmp_path / "model.pt.tmp").is_symlink()


def test_permissions_are_those_of_the_old_file_or_of_the_umask(tmp_path: Path):
    path, modes = tmp_path / "model.pt", []

    def write(file) -> None:
        modes.append(stat.S_IMODE(os.fstat(file.fileno()).st_mode))

    before = os.umask(0o027)
    try:
        for old in (None, 0o600, 0o664):
            if old is not None:
                path.chmod(old)
            write_atomically(path, write)
            modes.append(stat.S_IMODE(path.stat().st_mode))
    finally:
        os.umask(before)
    assert modes == [0o640, 0o640, 0o600, 0o600, 0o664, 0o664]


def test_other_files_beside_it_stay(tmp_path: Path):
    names = {
        "model.pt.tmp",
        f"other.pt.{'0' * 16}.tmp",
        "model.pt.0123.tmp",
        f"model_pt.{'0' * 16}.tmp",
    }
    for name in names:
        (tmp_path / name).write_text("another's")
    save_checkpoint(STATE, tmp_path / "model.pt")
    assert set(os.listdir(tmp_path)) == {*names, "model.pt"}


NUMPY_STATE = np.random.get_state()  # noqa: NPY002 - that of the whole process

REFUSED = {
    "state['rng']['numpy'][1] is of type numpy.ndarray": {"rng": {"numpy": NUMPY_STATE}},
    f"state['to'] is of type {type(Path()).__module__}.{type(Path()).__name__}": {"to": Path("a")},
    "state['model'] is of type torch.nn.modules.linear.Linear": {"model": torch.nn.Linear(2, 2)},
    "state['steps'][0] is of type numpy.int64": OrderedDict(steps=[np.int64(3)]),
    "state['schedule'] is of type function": {"schedule": lambda step: 1.0},
    "a key of state['x'] is of type frozenset": {"x": {frozenset(): 1}},
    "a checkpoint is a dict, got a list": [1, 2],
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_could_not_be_loaded_is_refused_before_the_file_is_replaced(saved: Path, message: str):
    before = saved.read_bytes()
    with pytest.raises(CheckpointError) as raised:
        save_checkpoint(REFUSED[message], saved)
    assert str(raised.value).startswith(f"{saved}: {message}")
    assert saved.read_bytes() == before
    assert os.listdir(saved.parent) == ["model.pt"]


def test_what_torch_loads_is_taken(tmp_path: Path):
    linear = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(linear.parameters())
    linear(torch.ones(4)).sum().backward()
    optimizer.step()
    state = {
        "model": linear.state_dict(keep_vars=True),
        "optimizer": optimizer.state_dict(),
        "low": fp8.scaled(torch.ones(4, 4), "e4m3"),
        "size": torch.Size((2, 3)),
        "dtype": torch.float16,
        "more": (1, 2.5, 1j, b"x", None, True, {1, 2}, OrderedDict(a=1)),
        "rng": torch.get_rng_state(),
        "meta": torch.empty(3, device="meta"),
    }
    save_checkpoint(state, tmp_path / "all.pt")
    loaded = load_checkpoint(tmp_path / "all.pt")
    assert loaded["more"] == state["more"]
    assert torch.equal(loaded["rng"], state["rng"])
    assert torch.equal(loaded["low"].dequantize(), torch.ones(4, 4))


FULL = """
import resource, signal, sys, torch
from fp8.checkpoints.files import save_checkpoint
path, *sizes = sys.argv[1:]
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
for size in sizes:
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(size), resource.RLIM_INFINITY))
    try:
        save_checkpoint({"x": torch.ones(100_000)}, path)
    except OSError as error:
        print(error.errno)
"""


def test_a_full_disk_leaves_the_old_file_and_says_so(saved: Path):
    """A limit on the size of files is an error of write, as a full disk is."""
    before = saved.read_bytes()
    process = python(FULL, saved, 0, 100, 200_000, 400_800, stdout=subprocess.PIPE)
    output, errors = process.communicate(timeout=100)
    assert output.split() == [str(errno.EFBIG).encode()] * 4, errors
    assert saved.read_bytes() == before
    assert os.listdir(saved.parent) == ["model.pt"]


def test_the_hash_is_of_what_was_written(saved: Path, monkeypatch: pytest.MonkeyPatch):
    """Not of what is read back: a bit that the disk changes at once is found."""
    save = torch.save

    def damaged(state: object, file) -> None:
        save(state, file)
        file.flush()
        (temporary,) = saved.parent.glob("model.pt.*.tmp")
        content = bytearray(temporary.read_bytes())
        content[content.index(b"\x00\x00\x80\x3f") + 3] ^= 1  # of a 1.0
        temporary.write_bytes(content)

    monkeypatch.setattr(torch, "save", damaged)
    save_checkpoint(STATE, saved)
    with pytest.raises(CheckpointError, match=r"model.pt: damaged"):
        load_checkpoint(saved)
