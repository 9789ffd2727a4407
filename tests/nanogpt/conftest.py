"""A text and options small enough to train on in a fraction of a second."""

import json

import pytest

TINY = {
    "layers": 1,
    "heads": 2,
    "width": 16,
    "context": 16,
    "batch-size": 4,
    "iters": 20,
    "warmup": 2,
    "eval-interval": 5,
    "eval-batches": 2,
    "threads": 1,
    "device": "cpu",
    "sample": 8,
}


@pytest.fixture(autouse=True)
def _alone(one_thread):
    """Models this small are slower on several threads."""


@pytest.fixture
def argv(text_file):
    """`argv(variants=..., iters=...)`: a command line of the tiny run, with changes."""

    def build(*flags, **changes):
        options = {"data": text_file, "variants": "fp32", **TINY}
        options.update(
            {name.replace("_", "-"): value for name, value in changes.items()}
        )
        return [*(f"--{name}={value}" for name, value in options.items()), *flags]

    return build


@pytest.fixture
def losses():
    """`losses(out)`: every loss of every run in a folder, to compare to the bit."""

    def read(out):
        runs = json.loads((out / "results.json").read_text())["runs"]
        return {
            (r["variant"], r["seed"]): (r["batch_loss"], r["curves"], r["sample"])
            for r in runs
        }

    return read


@pytest.fixture
def refused(capsys):
    """`refused(argv, unchanged=folder)`: the one line on stderr with which a command exits 2."""
    from notebooks.nanogpt.cli import main

    def run(command, unchanged=None):
        before = _contents(unchanged)
        with pytest.raises(SystemExit) as exit:
            main(command)
        out, err = capsys.readouterr()
        assert exit.value.code == 2
        assert out == ""
        assert err.count("\n") == 1, err
        assert _contents(unchanged) == before
        return err

    return run


def _contents(folder):
    if folder is None:
        return {}
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
