"""benchmarks/gpu.py, exercised on the CPU at a size that says nothing about speed."""

import json

import pytest
import torch

from benchmarks import gpu


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_small_on_the_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.common.RESULTS", tmp_path)
    monkeypatch.setattr(gpu, "OURS", ("unit",))  # each is compiled, which takes its time
    monkeypatch.setattr(gpu, "TORCHAO", ())
    gpu.main(["--device", "cpu", "--small", "linear"])
    record = json.loads((tmp_path / "gpu_small.json").read_text())
    (row,) = record["rows"]
    assert (row["device"], row["case"], row["name"], row["rounds"]) == ("cpu", "linear", "unit", 3)
    assert row["ratio"] > 0


@pytest.mark.parametrize("case", ["mlp", "layer"])
def test_each_case_makes_every_variant(case):
    model = gpu.CASES[case](64).bfloat16()
    x = torch.randn(2, 16, 64, dtype=torch.bfloat16)
    for name, variant in gpu.variants(model).items():
        assert variant(x).shape == x.shape, name


def test_what_it_refuses(capsys):
    for arguments, message in (
        (["--device", "cpu", "conv"], "unknown case 'conv'; choose one of linear, mlp, layer"),
        *([] if torch.cuda.is_available() else [([], "no CUDA device")]),
    ):
        with pytest.raises(SystemExit):
            gpu.main(arguments)
        assert message in capsys.readouterr().err
