"""`fp8.forecast`: what the compiler makes for a GPU, and the estimate without such a compiler."""

import json
from dataclasses import asdict, replace

import pytest
import torch
from torch import nn

import fp8
from fp8.__main__ import main
from fp8.lab.forecast import forecast as module
from fp8.lab.forecast.card import gradients, why_not
from fp8.lab.forecast.result import Forecast
from fp8.lab.hardware import BF16, HARDWARE
from tests.shared import assert_close, linears, normal, parametrize, proves, refuses

compiles = pytest.mark.skipif(bool(why_not()), reason=why_not())


def mlp(width=1024, dtype=torch.bfloat16):
    """Without memory, as a model of any size may be."""
    with torch.device("meta"):
        up, down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        return nn.Sequential(up, nn.GELU(), down).to(dtype)


def batch(tokens=4096, width=1024):
    return torch.empty(
        tokens, width, dtype=torch.bfloat16, device="meta", requires_grad=True
    )


# The walk over autograd's graph


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor, y):
        ctx.factor = factor
        return x * factor, y + x

    @staticmethod
    def backward(ctx, a, b):
        return a * ctx.factor + b, None, b


def branching(x, w):
    a, b = Doubled.apply(nn.functional.silu(x @ w), 3.0, x[:, :1].expand(-1, 4))
    return (a.softmax(-1) * b + torch.cat([x, x], 1)[:, 2:6]).sum(0) + w.mean(0)


def test_gradients_are_those_of_torch():
    x, w, g = (normal(*shape).double() for shape in ((5, 4), (4, 4), (4,)))
    unused = torch.zeros(3, requires_grad=True, dtype=torch.float64)
    x.requires_grad_(), w.requires_grad_()
    y, others = branching(x, w), (unused * 2).sum()
    got = gradients([y, others], [g, None], [x, w, unused])
    want = torch.autograd.grad(
        [branching(x, w), (unused * 2).sum()], [x, w, unused], [g, None]
    )
    assert_close(got, want, rtol=1e-12, atol=0)


# Without a compiler for GPUs


def test_without_a_cuda_build_shapes_give_an_estimate(monkeypatch):
    monkeypatch.setattr(module, "why_not", lambda: "torch is a build without CUDA")
    result = fp8.forecast(mlp(), batch(), recipes=("unit", "tensor"))
    assert result.source == "estimate"
    assert result.notes == ("torch is a build without CUDA",)
    assert [variant.recipe for variant in result.variants] == [BF16, "unit", "tensor"]
    assert result.ratio("unit") < result.ratio("tensor") < 1
    assert "an estimate from the shapes" in str(result)
    assert "kernels" not in result.table()
    assert Forecast.from_dict(json.loads(result.to_json())) == result
    assert asdict(result)["variants"][1]["recipe"] == "unit"
    with refuses("bf16, unit, tensor", KeyError):
        result["row"]


def uneven():
    """Two of three products are so small that casts take longer than they save."""
    with torch.device("meta"):
        model = linears(4096, 4096, 64, 64)
        return model, torch.empty(8192, 4096)


def left_alone(model, policy):
    return [
        row.path for row in fp8.report(fp8.convert(model, policy)) if row.left_alone
    ]


def test_layers_that_get_slower_stay_as_they_are(monkeypatch):
    monkeypatch.setattr(module, "why_not", lambda: "no")
    model, tokens = uneven()
    result = fp8.forecast(model, tokens, recipes=("tensor", fp8.Policy.hidden("row")))
    assert result.slower("tensor") == ["1", "2"]
    assert left_alone(model, result.policy("tensor")) == ["1", "2"]
    assert result.policy("row").keep == ("embedding", "readout")
    assert fp8.Policy.from_json(result.policy("row").to_json()) == result.policy("row")
    with refuses("'bf16' is no policy"):
        result.policy(BF16)


def test_a_device_that_the_compiler_does_not_know_is_estimated():
    result = fp8.forecast(
        mlp(64), batch(64, 64), hardware=replace(HARDWARE["h100"], name="mine")
    )
    assert result.source == "estimate"
    assert "mine" in result.notes[0]


@parametrize(
    "arguments, error, message",
    [
        ({"model": 3}, TypeError, "forecast"),
        ({"hardware": "h1000"}, ValueError, "h1000"),
        ({"recipes": ["e4m3"]}, ValueError, "e4m3"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with refuses(message, error):
        fp8.forecast(**{"model": mlp(64), "batch": batch(64, 64), **arguments})


# The command line


SETUP = """
import torch
from torch import nn


def setup(seed):
    with torch.device("meta"):
        return nn.Linear(64, 64), [torch.empty(32, 64, requires_grad=True)]


def alone():
    return nn.Linear(2, 2)
"""


def test_the_command_prints_the_table_or_json(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(module, "why_not", lambda: "no")
    (tmp_path / "forecast_setup.py").write_text(SETUP)
    setup = f"{tmp_path / 'forecast_setup.py'}:setup"
    assert main(["forecast", setup, "--recipes", "unit"]) == 0
    shown = capsys.readouterr()
    assert "of bf16" in shown.out
    assert shown.err == "fp8 forecast: compiling for h100: bf16, unit\n"
    assert (
        main(["forecast", setup, "--recipes", "unit", "--json", "--hardware", "b200"])
        == 0
    )
    assert json.loads(capsys.readouterr().out)["hardware"] == "b200"
    file = tmp_path / "policy.json"
    assert (
        main(["forecast", setup, "--recipes", "row", "unit", "--policy", str(file)])
        == 0
    )
    assert fp8.Policy.from_json(file).recipe == "unit"
    assert main(["forecast", setup.replace(":setup", ":alone")]) == 2
    assert "(model, batches[, loss])" in capsys.readouterr().err


# From the compiler's code


@proves("the field", "time of a step on a GPU, without the GPU")
@compiles
def test_kernels_are_those_of_the_recipe():
    model, before = mlp(), torch.cuda.is_available()
    result = fp8.forecast(model, batch(), recipes=("unit",))
    high, low = result.variants
    assert result.source == "compiler"
    assert (high.fp8, high.high, low.fp8, low.high) == (0, 6, 6, 0)
    assert low.kernels < high.kernels + 16  # a pass that is not looked at
    assert high.flops == low.flops == 6 * 2 * 4096 * 1024 * 4096
    assert low.saved < high.saved
    assert low.layers.keys() == {"0", "2"}
    assert result.slower("unit") == []
    assert result.ratio("unit") < 1
    assert torch.cuda.is_available() == before
    assert all(p.is_meta for p in model.parameters())
    assert "not measured" in str(result)


@compiles
def test_kernels_that_the_compiler_combines_are_counted():
    """Same products and bytes, but for a gradient that a combined kernel reads for its magnitudes
    and for a bias: it counts once. The small kernels of amax histories become few. CUDA graphs
    launch no kernel alone."""
    apart, together = (
        fp8.forecast(mlp(), batch(), recipes=("delayed",), options=options)["delayed"]
        for options in (None, {"combo_kernels": True, "mode": "reduce-overhead"})
    )
    assert apart.fp8 == together.fp8
    saved = apart.moved - together.moved
    assert -1e-3 * apart.moved <= saved <= batch().nbytes + 1e-3 * apart.moved
    assert together.kernels < 0.8 * apart.kernels
    assert together.seconds == together.card < apart.card
    assert together.host == 0 < apart.host


@compiles
def test_a_graph_reads_an_operand_once_for_the_backward_pass():
    """Magnitudes along the other axis are read with the gradient: a constant that all layers share
    would keep them in the forward pass (1.90 in place of 1.48). Scales are stored, not computed
    with each element: else the operand before its conversion is stored, in float32 (1.76)."""
    loss = lambda y: y.float().square().mean()  # noqa: E731
    plain, row = fp8.forecast(mlp(), batch(), loss, recipes=("row",)).variants
    assert row.moved < 1.6 * plain.moved


@compiles
def test_tensors_of_more_than_a_billion_elements_are_read_whole():
    """At most 1e9 elements of a buffer are counted by the compiler."""
    x = torch.empty(65536, 64, dtype=torch.bfloat16, device="meta")
    layer = nn.Linear(64, 32768, bias=False, dtype=torch.bfloat16, device="meta")
    assert fp8.forecast(layer, x, recipes=("unit",))["unit"].moved > 3 * 65536 * 32768
