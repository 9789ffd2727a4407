"""The command line: what it writes, and one line for whatever is wrong."""

import json

import pytest

from notebooks.nanogpt import cli
from notebooks.nanogpt.settings import PRESETS
from notebooks.nanogpt.variants import DEMO


def test_a_run_writes_results_a_plot_and_a_table(tmp_path, argv, capsys):
    command = argv(
        out=tmp_path / "run", variants="fp32,bf16", seeds="0,1", lr="bf16=0.003"
    )
    assert cli.main(command) == 0
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert (tmp_path / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")
    runs = [f"{run['variant']} {run['seed']}" for run in results["runs"]]
    assert runs == ["fp32 0", "fp32 1", "bf16 0", "bf16 1"]
    for run in results["runs"]:
        assert run["curves"]["step"] == [0, 5, 10, 15, 20]
        assert len(run["batch_loss"]) == 20
        assert run["val_loss"] == run["curves"]["val"][-1] < run["curves"]["val"][0]
        assert len(run["sample"]) == 9
    assert results["lr"] == {"fp32": PRESETS["small"].lr, "bf16": 0.003}
    assert results["machine"].keys() >= {"cpu", "threads", "device", "python", "torch"}
    out, err = capsys.readouterr()
    assert out.rstrip().endswith("loss.png")
    assert err.count("\n") == 4 * 5  # not a terminal: one line an evaluation


@pytest.mark.parametrize(
    ("instructions", "left_out"), [("AVX2", ["bf16"]), ("AVX512", [])]
)
def test_variants_that_the_cpu_emulates_are_left_out_and_named(
    instructions, left_out, tmp_path, argv, capsys, monkeypatch
):
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: instructions)
    command = [
        x for x in argv(out=tmp_path / "run", iters=1) if not x.startswith("--variants")
    ]
    assert cli.main(command) == 0
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert [name for name in DEMO if name not in results["lr"]] == left_out
    assert ("BF16 is left out" in capsys.readouterr().out) == bool(left_out)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": "missing.txt"}, "cannot read missing.txt: No such file or directory"),
        (
            {"context": 4000},
            "words.txt is too short: 4,000 tokens, a context of 4000 needs 40,010",
        ),
        (
            {"variants": "fp32,fp9"},
            "unknown variant 'fp9'; choose from fp32, bf16, fp8",
        ),
        ({"heads": 3}, "width must be a multiple of heads, got width 16 and 3 heads"),
        ({"iters": 0}, "iters must be at least 1, got 0"),
        (
            {"weight-decay": "nan"},
            "weight_decay must be finite and not negative, got nan",
        ),
        (
            {"seeds": "0,one"},
            "--seeds must be whole numbers separated by commas, got '0,one'",
        ),
        ({"seeds": 2**63}, "--seeds must be from 0 to 2**63 - 1"),
        ({"lr": "fp8=0.1"}, "--lr names 'fp8', which is not among --variants fp32"),
        (
            {"lr": "0.1,0.2"},
            "--lr must be a number or variant=number,..., got '0.1,0.2'",
        ),
        ({"device": "gpu"}, "unknown device 'gpu'"),
        ({"sample": -1}, "--sample must not be negative, got -1"),
        ({"optimizer": "sgd"}, "invalid choice: 'sgd'"),
    ],
)
def test_bad_input(tmp_path, argv, refused, changes, message):
    out = tmp_path / "run"
    assert message in refused(argv(**{"out": out, **changes}))
    assert not out.exists()


def test_text_that_is_not_utf8(tmp_path, argv, refused):
    path = tmp_path / "latin.txt"
    path.write_bytes("caf\u00e9 ".encode("latin-1") * 100)
    message = refused(argv(data=path, out=tmp_path / "run"))
    assert (
        "latin.txt is not UTF-8 text (at byte 3); --tokens byte trains on its bytes"
        in message
    )


def test_out_that_is_a_file(tmp_path, argv, refused):
    path = tmp_path / "taken"
    path.write_text("mine")
    assert "is not a folder" in refused(argv(out=path))
    assert "--resume needs --out" in refused(argv("--resume"))
    assert path.read_text() == "mine"


def test_optimizers(tmp_path, argv, losses):
    """They train alike, but for what their states are rounded to."""
    found = {}
    for name in ("adamw", "fp8", "8bit"):
        assert cli.main(argv(out=tmp_path / name, optimizer=name, sample=0)) == 0
        ((found[name], *_),) = losses(tmp_path / name).values()
    for name in ("fp8", "8bit"):
        assert found[name] != found["adamw"]
        assert found[name] == pytest.approx(found["adamw"], rel=0.02)
