"""Operands written to files."""

import copy

import pytest
import torch
from torch import nn

import fp8
from fp8.lab.stats import dump
from tests.fp8.products.test_grouped import COUNTS, Experts, inputs

safetensors = pytest.importorskip("safetensors.torch", reason="the files")


def make(recipe="tensor"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    return fp8.convert(model, recipe), torch.randn(8, 16)


@pytest.mark.proves("the field", "dumps of tensors", how="own")
def test_files_hold_operands_and_casts(tmp_path):
    model, x = make()
    x.requires_grad_()
    dumped = dump(model, ["0", "2.grad"], steps=(1, 3), to=tmp_path / "dumps")
    for _ in range(5):
        with dumped:
            y = model(x)
            y.backward(torch.ones_like(y))
    assert [path.name for path in dumped.files] == [f"step-00000{i}.safetensors" for i in (1, 3)]
    found = safetensors.load_file(dumped.files[0])
    operands = [f"0.{role}" for role in ("input", "weight", "grad")] + ["2.grad"]
    parts = ("before", "after", "scale")
    assert found.keys() == {f"{name}.{part}" for name in operands for part in parts}
    assert torch.equal(found["0.input.before"], x)
    assert torch.equal(found["0.weight.before"], model[0].weight)
    assert torch.equal(found["2.grad.before"], torch.ones(8, 16))
    for name, format in zip(operands, ("e4m3", "e4m3", "e5m2", "e5m2"), strict=True):
        before, after, scale = (found[f"{name}.{part}"] for part in parts)
        assert torch.equal(after, fp8.quantize(before, format, scale=scale))
    with safetensors.safe_open(dumped.files[1], "pt") as file:
        assert file.metadata() == {"step": "3"}


def test_second_casts_calls_and_groups_are_numbered(tmp_path):
    model, x = make("mxfp8")
    with dump(model, "2.*", to=tmp_path) as dumped:
        (model(x) + model(2 * x)).sum().backward()
    found = safetensors.load_file(dumped.files[0])
    assert {"2.input.before", "2.input.before.2", "2.input_again.after"} <= found.keys()
    assert not any("scale" in name for name in found)  # of blocks
    experts = fp8.convert(Experts(), "tensor")
    with dump(experts, "w2.input", to=tmp_path) as dumped:
        experts(*inputs())
    found = safetensors.load_file(dumped.files[0])
    befores = [found[n] for n in sorted(found) if ".before" in n]
    assert [len(t) for t in befores] == [n for n in COUNTS.tolist() if n]


def test_nothing_changes_and_other_steps_run_compiled(tmp_path):
    torch.compiler.reset()
    model, x = make()
    expected = model(x)
    compiled = torch.compile(copy.deepcopy(model), backend="eager")
    dumped = dump(compiled, "*", steps=[1], to=tmp_path)
    for _ in range(3):
        with dumped:
            y = compiled(x)
            y.sum().backward()
        assert torch.equal(y, expected)
    assert len(dumped.files) == 1


def test_bad_input(tmp_path):
    model, x = make()
    with pytest.raises(TypeError, match=r"needs an nn\.Module"):
        dump("model", "*", to=tmp_path)
    for pattern in ([], "", [3]):
        with pytest.raises(ValueError, match="needs a pattern"):
            dump(model, pattern, to=tmp_path)
    with pytest.raises(TypeError, match="steps must be"):
        dump(model, "*", steps=3, to=tmp_path)
    with (
        pytest.raises(ValueError, match=r"no cast operand matches 'q\*'; the pass had 0\.input"),
        dump(model, "q*", to=tmp_path),
    ):
        model(x)
    assert not list(tmp_path.iterdir())
    with dump(model, "*", to=tmp_path) as dumped:
        y = model(x)
    assert dumped.files
    with pytest.raises(RuntimeError, match="put backward inside"):
        y.sum().backward()
