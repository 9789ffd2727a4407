"""What no recipe can do: the error says so, the same for all of them."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fp8
from fp8 import RECIPES, Cast
from fp8.adapters import torchao
from fp8.casts.casting import cast_forward
from fp8.lab.trace import trace
from fp8.recipes.scaling import scaled_tiles
from fp8.training.fsdp import gather_in_fp8
from tests import reference
from tests.fp8.blocks import block
from tests.shared import (
    assert_same,
    filterwarnings,
    in_one_graph,
    linears,
    parametrize,
    randn,
    refuses,
    warns,
)
from unit_scaling.transforms import simulate_fp8, unit_scale

each_recipe = parametrize(
    "recipe", "unit tensor static row deepseek_v3 nvfp4 quartet2".split()
)


@each_recipe
@parametrize("dtype", [torch.int64, torch.complex64])
@filterwarnings("ignore:a product of complex numbers")
def test_tensors_that_are_not_floating_point(recipe, dtype):
    layer = fp8.convert(nn.Linear(8, 8), recipe)
    message = f"cannot quantize {dtype}; allowed are float32, bfloat16"
    with refuses(message, TypeError):
        layer(torch.zeros(2, 8, dtype=dtype))


@each_recipe
def test_a_second_derivative_is_computed_or_refused_by_name(recipe):
    layer, x = fp8.convert(nn.Linear(32, 16), recipe), randn(8, 32)
    y = layer(x).square().sum()
    if RECIPES[recipe].accumulate is not None:
        with refuses("create_graph=True: products with accumulate=", RuntimeError):
            torch.autograd.grad(y, x, create_graph=True)
        return
    (first,) = torch.autograd.grad(y, x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    assert second.isfinite().all()
    assert second.any()


def test_nested_tensors_in_products():
    x = torch.nested.nested_tensor(
        [torch.ones(2, 8), torch.ones(3, 8)], layout=torch.jagged
    )
    for product in (
        lambda: x @ torch.ones(8, 4),
        lambda: F.linear(x, torch.ones(4, 8)),
        lambda: fp8.convert(nn.Linear(8, 4))(x),
        lambda: F.scaled_dot_product_attention(*[x.unsqueeze(2).mT] * 3),
    ):
        with fp8.autocast("unit"), refuses("nested tensor", NotImplementedError):
            product()


USES = (fp8.convert, fp8.revert, fp8.report, fp8.stats, fp8.initialize, fp8.export)


@parametrize("use", [*USES, fp8.apply_low_precision_layernorm])
def test_what_is_no_module(use):
    with refuses(f"{use.__name__} needs an nn.Module, got list", TypeError):
        use([nn.Linear(8, 8)], *(["folder"] if use is fp8.export else []))


def test_models_that_cannot_be_converted_stay():
    lazy = nn.Sequential(nn.Linear(8, 8), nn.LazyLinear(8))
    with refuses("1 has no weight yet: call the model once"):
        fp8.convert(lazy)
    assert [row.done for row in fp8.report(lazy)] == ["left alone"] * 2
    lazy(torch.ones(2, 8))
    assert [row.done for row in fp8.report(fp8.convert(lazy))] == ["converted"] * 2
    with warns("torch.jit", (DeprecationWarning, FutureWarning)):
        scripted = nn.Sequential(nn.Linear(8, 8), torch.jit.script(nn.Linear(8, 8)))
    for use in (fp8.convert, fp8.initialize, unit_scale, simulate_fp8):
        with refuses("'1' is a TorchScript module", TypeError):
            use(scripted)
    assert type(scripted[0]) is nn.Linear


@parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_weights_of_one_byte_are_left_alone(dtype):
    """They are codes: to be read with a scale that nothing here knows."""
    model = linears(8, 8, 8)
    model[0].weight = nn.Parameter(model[0].weight.to(dtype), requires_grad=False)
    rows = [(row.done, row.why) for row in fp8.report(fp8.convert(model))]
    assert rows[0] == ("left alone", f"quantized: its weight is {dtype}")
    assert rows[1][0] == "converted"
    with refuses("0 is quantized"):
        unit_scale(model)


@parametrize("use", [fp8.convert, fp8.apply_low_precision_layernorm])
def test_what_was_changed_cannot_be_scripted(use):
    model = use(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)))
    with refuses(r"cannot be scripted: take torch.export, or fp8.revert", TypeError):
        torch.jit.script(nn.Sequential(model))
    with refuses(r"cannot be traced: take torch.export, or fp8.revert", TypeError):
        torch.jit.trace(model, torch.randn(2, 8))
    assert model(torch.randn(2, 8)).shape == (2, 8)
    torch.jit.script(fp8.revert(model))


def test_a_model_of_unit_scale_is_scripted_and_traced_once_its_values_are_set():
    x = torch.randn(16, 8)
    model = unit_scale(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)))
    with refuses("sets the values of the model in its first call", AttributeError):
        torch.jit.script(model)
    with refuses(r"call it once.* before torch\.jit\.trace", RuntimeError):
        torch.jit.trace(model, x)
    assert model[0].weight.mup_pending
    y = model(x)
    assert_same(torch.jit.script(model)(x), y)
    assert_same(torch.jit.trace(model, x)(x), y)


READERS = {
    "export": lambda model: fp8.export(model, "none"),
    "weights": fp8.weights,
    "cached_weights": lambda model: fp8.cached_weights(model).__enter__(),
    "initialize": fp8.initialize,
    "store_frozen": lambda model: fp8.store_frozen(model.requires_grad_(False)),
    "load": lambda model: fp8.load(model, model.state_dict()),
    "gather_in_fp8": gather_in_fp8,
    "forecast": lambda model: fp8.forecast(model, torch.ones(2, 16)),
    "the list of products": lambda model: trace(model, torch.ones(2, 16)),
    "layers of torchao": lambda model: torchao.convert(fp8.revert(model), "tensor"),
}


@parametrize("what", READERS)
def test_what_reads_values_waits_for_the_first_call_of_unit_scale(what):
    pytest.importorskip("safetensors")
    for part in (lambda model: model, nn.Sequential):
        model = part(fp8.convert(unit_scale(linears(16, 16)), "tensor"))
        message = rf"{'export' if what == 'weights' else what}.* reads .*0\.weight, which the first"
        with refuses(message):
            READERS[what](model)
        assert all(
            type(p) is nn.Parameter and p.mup_pending for p in model.parameters()
        )


# --- scales, tiles, formats and views that were accepted and gave a wrong result


@pytest.mark.vmap
def test_scale_tensors_that_cannot_be_looked_at_make_nan():
    """In a graph and under vmap, where nothing can be raised."""
    x, scale = torch.ones(3, 2), torch.tensor([1.0, 0.0, -2.0])

    def cast(x, scale):
        return fp8.quantize(x, "e4m3", scale=scale)

    compiled = in_one_graph(cast, "eager")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")
        mapped = torch.func.vmap(cast)(x, scale)
    for y in (compiled(x, scale[:, None]), mapped):
        assert_same(y.isnan().all(1), torch.tensor([False, True, True]))


@parametrize("tile", [(1 << 16, 1 << 16), (1, 1 << 16), (1 << 16, 1)])
@parametrize("axis", [-1, -2])
def test_a_tile_larger_than_its_operand_takes_no_more_memory(tile, axis):
    cast = Cast(format="e4m3", scaling="block", tile=tile)
    for shape in ((3, 5), (1, 7), (6, 1)):
        x = randn(*shape)
        tiles, _ = scaled_tiles(x, tile, axis)
        assert tiles.numel() <= 2 * x.numel()
        assert_same(cast_forward(x, cast, axis), reference.cast(x, cast, axis).float())


@each_recipe
def test_views_with_the_negative_bit(recipe):
    """The imaginary part of a conjugate: -x where memory has x."""
    x = torch.complex(randn(64, 32), randn(64, 32)).conj().imag
    assert x.is_neg()
    plain = x.resolve_neg().clone()
    got = cast_forward(x, fp8.RECIPES[recipe].input)
    torch.manual_seed(0)
    assert_same(got, cast_forward(plain, fp8.RECIPES[recipe].input))
    assert_same(fp8.quantize(x, "e5m2"), fp8.quantize(plain, "e5m2"))
    with block(recipe):
        y = F.linear(x, randn(16, 32))
    with block(recipe):
        assert_same(y, F.linear(plain, randn(16, 32)))


def test_a_model_without_values_gets_no_level():
    """``to_empty`` would take its level away, and the optimizer hold what was there before."""
    with torch.device("meta"):
        model = nn.Linear(8, 8)
    with refuses("weight is on the meta device: give the model memory"):
        fp8.initialize(model, torch.optim.AdamW(model.parameters()))
    assert type(model) is nn.Linear


def test_the_package_names_an_attribute_it_lacks():
    with refuses("module 'fp8' has no attribute 'typo'", AttributeError):
        fp8.typo  # noqa: B018
