"""benchmarks/gpu.py, exercised on the CPU at a size that says nothing about speed."""

import json

import pytest
import torch

from benchmarks import gpu
from fp8.lab.hardware import Hardware, Product, estimate, matmul_seconds


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.native(whole_graph=True)
def test_small_on_the_cpu(tmp_path, monkeypatch, capsys):
    """Rows of what runs and of what does not, printed; they are no figures to be kept."""
    monkeypatch.setattr("benchmarks.common.RESULTS", tmp_path)
    monkeypatch.setattr(gpu, "OURS", ("unit", "block"))  # each is traced, which takes its time
    monkeypatch.setattr(gpu, "TORCHAO", ())
    gpu.main(["--device", "cpu", "--small", "linear"])
    unit, block = capsys.readouterr().out.splitlines()[-2:]
    assert unit.split()[:5] == ["cpu", "linear", "128", "128", "unit"]
    assert block.split()[:5] == ["cpu", "linear", "128", "128", "block"]
    assert block.endswith("scales by block need CUDA devices of compute capability 9.0")
    assert not list(tmp_path.iterdir())


@pytest.mark.native
@pytest.mark.parametrize("case", ["mlp", "layer"])
def test_each_case_makes_every_variant(case):
    model = gpu.CASES[case](64).bfloat16()
    x = torch.randn(2, 16, 64, dtype=torch.bfloat16)
    for name, variant in gpu.variants(model, ("unit", "tensor", "row", "delayed")).items():
        assert variant(x).shape == x.shape, name


def test_what_it_refuses(capsys):
    for arguments, message in (
        (
            ["--device", "cpu", "conv"],
            "unknown case 'conv'; choose one of linear, mlp, layer, hardware",
        ),
        *([] if torch.cuda.is_available() else [([], "no CUDA device")]),
    ):
        with pytest.raises(SystemExit):
            gpu.main(arguments)
        assert message in capsys.readouterr().err


@pytest.mark.native
def test_rates_of_this_machine_are_a_row_of_the_roofline():
    """With a clock that says that every call takes a millisecond."""
    measured = gpu.hardware_row("cpu", 64, lambda call: call() is None or 1e-3)
    row = Hardware(**json.loads(json.dumps(measured)))
    assert row.peak == {"bf16": 2 * 64**3 / 1e-3, "fp8": 2 * 64**3 / 1e-3}
    assert row.bandwidth == 2 * 64**2 * 2 / 1e-3
    assert row.memory > 1 << 30
    assert matmul_seconds(row, 1024, 1024, 1024) == pytest.approx(1024**3 / 64**3 * 1e-3, rel=1e-3)
    layer = Product("up", "hidden", "linear", 1024, 1024, 1024, weight_elements=1 << 20)
    assert estimate([layer], {"up": "tensor"}, row).step > 0


def test_the_clock():
    passed = []
    assert gpu.seconds(lambda: passed.append(1), rounds=5) > 0
    assert len(passed) == 8
