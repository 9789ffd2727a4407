"""A folder continues after its last finished run, or is refused and left as it is."""

import pytest

from notebooks.nanogpt import session
from notebooks.nanogpt.cli import main


def test_finished_runs_are_not_trained_again(tmp_path, argv, monkeypatch, losses):
    options = {"variants": "fp32,fp8_static", "dropout": 0.2, "sample": 0}
    command = argv("--resume", out=tmp_path / "stopped", **options)
    train, calls = session._train_one, iter("a")

    def stops(*args):
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return train(*args)

    monkeypatch.setattr(session, "_train_one", stops)
    with pytest.raises(KeyboardInterrupt):
        main(command)
    monkeypatch.undo()
    assert [variant for variant, _ in losses(tmp_path / "stopped")] == ["fp32"]
    main(command)
    main(argv(out=tmp_path / "undisturbed", **options))
    assert losses(tmp_path / "stopped") == losses(tmp_path / "undisturbed")
    monkeypatch.setattr(session, "_train_one", None)
    assert main(command) == 0


def test_what_is_no_run_to_continue_is_left_as_it_is(tmp_path, argv, refused, capsys):
    out = tmp_path / "run"
    main(argv(out=out, iters=1, eval_batches=1, sample=0))
    capsys.readouterr()
    same = {"iters": 1, "eval_batches": 1, "sample": 0}
    message = refused(argv("--resume", out=out), unchanged=out)
    assert "settings.eval_batches was 1, is 2" in message
    message = refused(argv(out=out, **same), unchanged=out)
    assert (
        "holds a run already; pass --resume to continue it, or another --out" in message
    )
    for flags in ([], ["--resume"]):  # tmp_path holds the folder of the run
        message = refused(argv(*flags, out=tmp_path), unchanged=tmp_path)
        assert "is not empty and holds no run" in message
    (out / "results.json").write_text('{"settings": ')
    assert "is damaged" in refused(argv("--resume", out=out), unchanged=out)
