"""Killed in the middle and resumed, a run gives the bits of an undisturbed one."""

import json
import multiprocessing
import signal
from pathlib import Path

import pytest
import torch

from notebooks.nanogpt.cli import main
from tests.nanogpt.killed import killed

PRELOAD = [  # what a run imports, so that the processes to be killed start quickly
    "notebooks.nanogpt.cli",
    "unit_scaling.transforms",
    "torch._dynamo",
    "matplotlib.backends.backend_agg",
]


@pytest.mark.parametrize(
    ("variant", "moment"), [("unit_scaled_fp8", "write"), ("fp8_static", "step")]
)
def test_killed_in_the_middle(tmp_path: Path, argv, losses, variant: str, moment: str) -> None:
    """The last whole checkpoint, that of step 10 with the scales of the casts, is left."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    options = {"variants": variant, "dropout": 0.2}
    command = argv("--resume", out=tmp_path / "killed", **options)
    process = context.Process(target=killed, args=(command, moment))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    (path,) = tmp_path.glob("killed/checkpoints/*.pt")
    assert torch.load(path, weights_only=True)["step"] == 10
    main(command)
    main(argv(out=tmp_path / "undisturbed", **options))
    assert losses(tmp_path / "killed") == losses(tmp_path / "undisturbed")


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
    path.parent.mkdir()
    path.write_bytes(b"PK\x03\x04 not a checkpoint")
    message = refused(argv("--resume", out=prepared), unchanged=prepared)
    assert f"{path}: damaged, or no checkpoint" in message
    torch.save({"variant": "fp32", "seed": 0}, path)
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
