"""Stopped in the middle and resumed, a run gives the bits of an undisturbed one."""

import json
from pathlib import Path

import pytest
import torch

from notebooks.nanogpt.cli import main
from notebooks.nanogpt.files import load_checkpoint, save_checkpoint


def test_interrupted_in_the_middle_of_a_step(tmp_path: Path, argv, losses, monkeypatch) -> None:
    """Step 13. The last checkpoint, that of step 10 with the scales of the casts, is continued."""
    clip, calls = torch.nn.utils.clip_grad_norm_, iter(range(12))

    def stops(*args: object) -> torch.Tensor:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return clip(*args)

    options = {"variants": "fp8_static", "dropout": 0.2}
    command = argv("--resume", out=tmp_path / "stopped", **options)
    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.utils, "clip_grad_norm_", stops)
        with pytest.raises(KeyboardInterrupt):
            main(command)
    (path,) = tmp_path.glob("stopped/checkpoints/*.pt")
    assert load_checkpoint(path)["step"] == 10
    main(command)
    main(argv(out=tmp_path / "undisturbed", **options))
    assert losses(tmp_path / "stopped") == losses(tmp_path / "undisturbed")


def test_a_file_that_is_half_written_leaves_the_last_one(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "folder" / "a.pt"
    save_checkpoint({"step": 1}, path)

    def half(state: object, file) -> None:
        file.write(b"PK\x03\x04 the first bytes")
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", half)
        with pytest.raises(OSError, match="no space left"):
            save_checkpoint({"step": 2}, path)
    assert load_checkpoint(path) == {"step": 1}
    save_checkpoint({"step": 2}, path)
    assert load_checkpoint(path) == {"step": 2}
    assert list(path.parent.iterdir()) == [path]


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
        ({"variants": "fp32,bf16"}, "lr.bf16 was None, is 0.004"),
    ],
)
def test_other_settings_are_refused(prepared: Path, argv, refused, changes, message: str) -> None:
    assert message in refused(argv("--resume", out=prepared, **changes), unchanged=prepared)


def test_damaged_files_are_refused(prepared: Path, argv, refused) -> None:
    path = prepared / "checkpoints" / "fp32-seed0.pt"
    path.parent.mkdir()
    path.write_bytes(b"PK\x03\x04 not a checkpoint")
    message = refused(argv("--resume", out=prepared), unchanged=prepared)
    assert f"{path}: damaged, or no checkpoint" in message
    torch.save({"variant": "fp32", "seed": 0}, path)
    assert "state does not fit" in refused(argv("--resume", out=prepared), unchanged=prepared)
    (prepared / "settings.json").write_text('{"settings": ')
    assert "is damaged" in refused(argv("--resume", out=prepared), unchanged=prepared)


def test_what_is_in_a_folder_is_left_alone(prepared: Path, tmp_path: Path, argv, refused) -> None:
    message = refused(argv(out=prepared), unchanged=prepared)
    assert "holds a run already; pass --resume to continue it, or another --out" in message
    for flags in ([], ["--resume"]):  # tmp_path holds the folder of the run
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
