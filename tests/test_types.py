"""A user's program with types: `make lint` has mypy check it as strictly as it can; and it runs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import assert_type

import fp8
import fp8.optim
import unit_scaling as uu
import unit_scaling.functional as U
from fp8.common.report import Row
from fp8.recipes.policy import LayerRule
from unit_scaling.parameter import has_parameter_data
from unit_scaling.transforms import compile, simulate_fp8, track_scales, unit_scale


def test_a_model_keeps_its_type() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU())
    assert_type(
        fp8.convert(model, "unit", where=lambda name, layer: name == "0"), nn.Sequential
    )
    assert_type(fp8.revert(model), nn.Sequential)
    assert_type(
        fp8.apply_low_precision_layernorm(nn.Sequential(nn.LayerNorm(4))), nn.Sequential
    )
    for transform in (unit_scale, simulate_fp8, track_scales, compile):
        assert_type(transform(model), nn.Sequential)


def test_a_policy_of_tuples() -> None:
    policy = fp8.Policy(
        "row", rules=[("0", None, None)], keep=[], switch=[(0.9, "bf16")]
    )
    assert_type(policy.rules, tuple[LayerRule, ...])
    model = fp8.convert(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), policy)
    assert_type(model, nn.Sequential)
    assert_type(fp8.advance(model, 0.95), bool)
    with fp8.autocast(fp8.Policy("row")):
        model(torch.randn(2, 16))


def test_an_optimizer_keeps_its_type() -> None:
    model = nn.Linear(16, 16)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = fp8.initialize(model, optimizer)  # under the names that they had
    assert_type(fp8.initialize(nn.Linear(16, 16)), tuple[nn.Linear, fp8.optim.AdamW])
    uu.optim.AdamW(
        uu.Linear(4, 4).parameters(), lr=0.5, betas=(0.9, 0.95), maximize=True
    )


def test_rows_of_reports_have_types() -> None:
    for row in fp8.report(fp8.convert(nn.Sequential(nn.Linear(16, 16)))):
        assert_type(row, Row)
    model = unit_scale(nn.Sequential(nn.Linear(16, 16)))
    x = torch.randn(2, 16)
    assert_type([row.rms for row in uu.verify(model, x).outside], list[float])
    model(x)
    assert_type([row.what for row in uu.report(model).left_alone], list[str])


def test_a_decorated_function_keeps_its_arguments() -> None:
    @fp8.autocast("unit")
    def product(a: Tensor, b: Tensor) -> Tensor:
        return a @ b

    x = torch.randn(4, 4)
    assert_type(product(x, b=x), Tensor)
    with pytest.raises(TypeError):
        product(x, "x")  # type: ignore[arg-type]


def pooled(x: Tensor) -> Tensor:
    return U.relu(U.avg_pool1d(x, 2))


def test_modules_and_functions() -> None:
    layer = uu.Linear(
        4, 4, bias=True, device="cpu", dtype=torch.bfloat16, constraint=None
    )
    assert_type(layer.forward(torch.randn(2, 4, dtype=torch.bfloat16)), Tensor)
    assert pooled(torch.randn(1, 2, 4)).shape == (1, 2, 2)
    with pytest.raises(TypeError):
        uu.Linear(4, 4, device=0.5)  # type: ignore[arg-type]
    assert_type(U.residual_split(torch.randn(4), tau=0.5), tuple[Tensor, Tensor])
    for parameter in layer.parameters():
        assert has_parameter_data(parameter)
        assert parameter.mup_type in ("weight", "bias")


def test_casts_and_recipes() -> None:
    assert_type(fp8.quantize(torch.randn(4), "e4m3"), Tensor)
    assert_type(fp8.scaled(torch.randn(4), "e4m3").dequantize(), Tensor)
    cast = fp8.Cast(format=fp8.FORMATS["e4m3"], scaling="row")
    recipe = fp8.Recipe(name="mine", input=cast, weight=cast, grad=None)
    assert_type(fp8.Recipe.from_dict(recipe.to_dict()), fp8.Recipe)
