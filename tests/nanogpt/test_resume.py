"""Killed at any moment and resumed, a run gives the bits of an undisturbed one."""

import json
import multiprocessing
import signal
from pathlib import Path

import pytest

from fp8.checkpoints.files import load_checkpoint, save_checkpoint
from notebooks.nanogpt.cli import main
from tests.nanogpt.killed import killed

MANY = {"variants": "fp32,unit_scaled_fp8", "seeds": "0,1", "dropout": 0.2, "iters": 40}
PRELOAD = [  # what a run imports, so that the processes to be killed start quickly
    "notebooks.nanogpt.cli",
    "unit_scaling.transforms",
    "torch._dynamo",
    "matplotlib.backends.backend_agg",
]


@pytest.mark.exhaustive
def test_killed_again_and_again(tmp_path: Path, argv, losses) -> None:
    """SIGKILL after ever longer times, until a process lives long enough to finish.

    Real processes, forked from a server that has imported torch already, so that many moments
    can be tried. What is compared is every loss of every step, exactly.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    command = argv("--resume", out=tmp_path / "killed", **MANY)
    kills, moments = 0, set()
    for attempt in range(20):
        process = context.Process(target=main, args=(command,))
        process.start()
        process.join(0.2 * 1.4**attempt)
        if process.exitcode is not None:
            break
        process.kill()
        process.join()
        kills += 1
        moments.add(_progress(tmp_path / "killed"))
    assert process.exitcode == 0
    assert kills >= 3
    assert len(moments) >= 2
    main(argv(out=tmp_path / "undisturbed", **MANY))
    assert losses(tmp_path / "killed") == losses(tmp_path / "undisturbed")


@pytest.mark.parametrize(("moment", "step"), [("step", 10), ("write", 10), ("rename", 10)])
def test_killed_in_the_middle(tmp_path: Path, argv, losses, moment: str, step: int) -> None:
    """Of a step, of writing a checkpoint, between writing and renaming: what was last whole is
    left, and continued to the bits of an undisturbed run."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    options = {"variants": "unit_scaled_fp8", "dropout": 0.2}
    command = argv("--resume", out=tmp_path / "killed", **options)
    process = context.Process(target=killed, args=(command, moment))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert _progress(tmp_path / "killed") == (("unit_scaled_fp8-seed0.pt", step),)
    main(command)
    main(argv(out=tmp_path / "undisturbed", **options))
    assert losses(tmp_path / "killed") == losses(tmp_path / "undisturbed")


def test_static_scales_are_in_the_checkpoint(tmp_path: Path, argv, losses) -> None:
    """A run of 20 steps that is stopped after 10 is continued with the scales of the first step."""
    killed_out, options = tmp_path / "killed", {"variants": "fp8_static"}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    process = context.Process(target=killed, args=(argv(out=killed_out, **options), "step"))
    process.start()
    process.join()
    assert _progress(killed_out) == (("fp8_static-seed0.pt", 10),)
    (path,) = killed_out.glob("checkpoints/*.pt")
    state = load_checkpoint(path)["model"]
    scales = [float(scale) for name, scale in state.items() if "fp8_scale_" in name]
    assert scales
    assert min(scales) > 0
    main(argv("--resume", out=killed_out, **options))
    main(argv(out=tmp_path / "undisturbed", **options))
    assert losses(killed_out) == losses(tmp_path / "undisturbed")


def _progress(out: Path) -> tuple[tuple[str, int], ...]:
    """How far each checkpoint is; loading it proves that the kill left it whole."""
    files = sorted(out.glob("checkpoints/*.pt"))
    return tuple((file.name, load_checkpoint(file)["step"]) for file in files)


def test_finished_runs_are_not_trained_again(tmp_path: Path, argv, monkeypatch) -> None:
    main(argv(out=tmp_path))
    before = json.loads((tmp_path / "results.json").read_text())
    monkeypatch.setattr("notebooks.nanogpt.session.Training", None)
    assert main(argv("--resume", out=tmp_path)) == 0
    assert json.loads((tmp_path / "results.json").read_text()) == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"iters": 30}, "settings.iters was 20, is 30"),
        ({"seeds": "1"}, "seeds was [0], is [1]"),
        ({"lr": "0.5"}, "lr.fp32 was 0.004, is 0.5"),
        ({"variants": "fp32,bf16"}, "lr.bf16 was None, is 0.004"),
        ({"threads": 2}, "threads was 1, is 2"),
        ({"data": None}, "data.name was 'words.txt', is 'Python standard library'"),
    ],
)
def test_other_settings_are_refused(prepared: Path, argv, refused, changes, message: str) -> None:
    command = [part for part in argv("--resume", out=prepared, **changes) if part != "--data=None"]
    assert message in refused(command, unchanged=prepared)


def test_a_corrupt_checkpoint_is_refused(prepared: Path, argv, refused) -> None:
    path = prepared / "checkpoints" / "fp32-seed0.pt"
    path.write_bytes(b"PK\x03\x04 not a checkpoint")
    message = refused(argv("--resume", out=prepared), unchanged=prepared)
    assert f"{path}: cut short, or no checkpoint" in message
    save_checkpoint({"variant": "fp32", "seed": 0}, path)
    content = path.read_bytes()
    path.write_bytes(content[:300] + bytes([content[300] ^ 1]) + content[301:])
    assert f"{path}: damaged" in refused(argv("--resume", out=prepared), unchanged=prepared)
    path.write_bytes(content)
    assert "state does not fit" in refused(argv("--resume", out=prepared), unchanged=prepared)


def test_damaged_settings_are_refused(prepared: Path, argv, refused) -> None:
    (prepared / "settings.json").write_text('{"settings": ')
    assert "is damaged" in refused(argv("--resume", out=prepared), unchanged=prepared)


def test_a_run_is_not_overwritten(prepared: Path, argv, refused) -> None:
    message = refused(argv(out=prepared), unchanged=prepared)
    assert "holds a run already; pass --resume to continue it, or another --out" in message


def test_a_folder_with_something_else_in_it_is_left_alone(tmp_path: Path, argv, refused) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    for flags in ([], ["--resume"]):
        message = refused(argv(*flags, out=tmp_path), unchanged=tmp_path)
        assert "is not empty and holds no run" in message


@pytest.fixture
def prepared(tmp_path: Path, argv) -> Path:
    """A folder as a kill just after the start leaves it: settings, no checkpoint."""
    from notebooks.nanogpt import cli, session

    out = tmp_path / "run"
    args = cli._build_parser().parse_args(argv(out=out))
    session.prepare(cli._session(args), resume=False)
    return out
