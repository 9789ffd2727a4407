"""Files for serving, read back by the libraries that serve them, on the CPU."""

import json

import pytest
import torch
from torch import nn

import fp8
import unit_scaling as uu
from fp8 import Cast, Recipe
from tests.fp8.adapters import hub_models
from tests.fp8.adapters.hub_models import quiet, transformers  # noqa: F401
from tests.fp8.checkpoints.reading import exact, loaded
from tests.shared import (
    Net,
    assert_close,
    assert_same,
    by_path,
    descend,
    linears,
    parametrize,
    quietly,
    refuses,
    theirs,
)
from unit_scaling.transforms import simulate_fp8, unit_scale

with quietly():
    safetensors = pytest.importorskip("safetensors.torch")
    pytest.importorskip("compressed_tensors", reason="reads the files")


pytestmark = theirs


RECIPES = {
    "unit": "unit",
    "delayed": "delayed",
    "static": "static",
    "tensor": exact("tensor"),
    "row": exact("row"),
    "mixed": Recipe(
        name="mixed",
        input=Cast(format="e4m3"),
        weight=Cast(format="e4m3", scaling="row"),
    ),
}

IDS = torch.arange(24).reshape(2, 12) % 64


def llama(**options):
    return hub_models.llama(initializer_range=0.2, **options)


def trained(model):
    """After two steps, with which "delayed" has a history."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    descend(optimizer, (model(input_ids=IDS, labels=IDS).loss for _ in range(2)))
    return model.eval()


@torch.no_grad()
def logits(model):
    return model(input_ids=IDS).logits


def served(folder, dtype=torch.float32):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def tolerance(want):
    """The operands are the same numbers. What is left is the order in which float32 is summed and
    scaled, of up to 64 terms in each of 14 layers: sqrt(64 * 14) * 2**-24 = 2e-6, and 5 times that.
    """
    return 1e-5 * want.abs().max().item()


@parametrize("name", RECIPES)
def test_served_as_it_was_trained(name, tmp_path):
    model = trained(fp8.convert(llama(), fp8.Policy.hidden(RECIPES[name])))
    report = fp8.export(model, tmp_path)
    assert [row.done for row in report] == ["FP8"] * 14
    want = logits(model)
    assert_close(logits(served(tmp_path)), want, rtol=1e-5, atol=tolerance(want))
    plain = logits(fp8.revert(model))
    assert (want - plain).abs().max() > 1e-3 * plain.abs().max()


def test_weights_of_a_level(tmp_path):
    """That are stored in FP8 as they are kept."""
    model = fp8.convert(llama(), fp8.Policy.hidden("unit"))
    model, optimizer = fp8.initialize(model, opt_level="O3", recipe=None)
    model(input_ids=IDS, labels=IDS).loss.backward()
    optimizer.step()
    model.eval()
    fp8.export(model, tmp_path)
    want = logits(model)
    assert_close(logits(served(tmp_path)), want, rtol=1e-5, atol=tolerance(want))


def test_mxfp8(tmp_path):
    """compressed-tensors casts inputs as well, and rounds their scales up as the recipe does, but
    for blocks whose largest magnitude is 448 times a power of two, which get the next power.
    Operands of other tokens are the same, and so are products to the bit."""
    model = trained(fp8.convert(llama().bfloat16(), fp8.Policy.hidden("mxfp8")))
    assert {row.done for row in fp8.export(model, tmp_path)} == {"FP8"}
    reader = served(tmp_path, torch.bfloat16)
    assert (logits(reader) - logits(model)).norm() < 0.1 * logits(model).norm()
    theirs, ours = (m.model.layers[1].mlp.down_proj for m in (reader, model))
    x = torch.randn(8, 128, ours.in_features).bfloat16()
    mantissas = torch.frexp(x.unflatten(-1, (-1, 32)).abs().amax(-1).float())[0] * 2
    same = (mantissas != 1.75).all(-1)
    assert 0.9 < same.float().mean() < 1
    with torch.no_grad():
        assert_same(theirs(x)[same], ours(x)[same])


@parametrize("recipe", ["block", "mxfp8"])
def test_blocks_that_are_not_whole(recipe, tmp_path):
    """Readers take the size of a block from the number of scales, or know it."""

    model = Net(wide=nn.Linear(256, 256), odd=nn.Linear(200, 256))
    report = by_path(fp8.export(fp8.convert(model, recipe), tmp_path))
    assert report["wide"].done == "FP8"
    assert report["odd"].why.endswith("blocks: take recipe 'row'")
    stored = safetensors.load_file(tmp_path / "model.safetensors")
    scale = "weight_scale_inv" if recipe == "block" else "weight_scale"
    shapes = {"block": (2, 2), "mxfp8": (256, 8)}
    assert tuple(stored[f"wide.{scale}"].shape) == shapes[recipe]


def read_back(model, folder):
    """A plain ``model`` with the weights of ``folder``, by compressed-tensors alone."""
    config = json.loads((folder / "fp8.json").read_text())["quantization_config"]
    return loaded(model, safetensors.load_file(folder / "model.safetensors"), config)


def with_zeros():
    """A layer of zeros, and one that sees zeros alone because of it."""
    sizes = {"first": (16, 32), "zero": (32, 16), "after": (16, 16)}
    layers = {name: nn.Linear(*size, bias=False) for name, size in sizes.items()}
    nn.init.zeros_(layers["zero"].weight)
    return Net(lambda m, x: x + m.after(m.zero(m.first(x))), **layers)


@parametrize("rate", [0.0, 0.1])
@parametrize("name", ["delayed", "static", "row"])
def test_a_layer_of_zeros(name, rate, tmp_path):
    """It is stored as zeros, and with its own scale after the first step, before its next pass. The
    scale of an input that was zeros alone is not known: its layer is in high precision."""
    model = fp8.convert(with_zeros(), RECIPES[name])
    model(torch.randn(8, 16)).square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=rate).step()
    report = by_path(fp8.export(model, tmp_path))
    assert report["first"].done == report["zero"].done == "FP8"
    assert report["after"].left_alone == (name != "row")
    why = report["after"].why
    assert name == "row" or "has seen no input that is not all zeros" in why
    stored = safetensors.load_file(tmp_path / "model.safetensors")
    values = stored["zero.weight"].float() * stored["zero.weight_scale"]
    assert_close(values, model.zero.weight.detach(), rtol=2**-4, atol=2.0**-10)


@parametrize("shape", [(8, 64), (2, 8, 64), (2, 2, 8, 64)])
def test_rows_of_inputs_of_any_dimension(shape, tmp_path):
    """A scale for each token: compressed-tensors' strategy "token" has one for all of an input of
    two dimensions, 2e-2 off."""
    model = fp8.convert(linears(64, 48, nn.GELU, 32), exact("row"))
    fp8.export(model, tmp_path)
    plain = linears(64, 48, nn.GELU, 32)
    x = torch.randn(shape) * torch.logspace(-3, 3, shape[-2])[:, None]
    with torch.no_grad():
        want, got = model(x), read_back(plain, tmp_path)(x)
    assert_close(got, want, rtol=1e-5, atol=tolerance(want))


def test_rows_of_experts(tmp_path):
    """Engines that fuse a list of experts insist on the strategy "token"."""
    model = nn.Module()
    model.layers = nn.ModuleList([nn.ModuleDict({"dense": nn.Linear(32, 32)})])
    model.layers[0]["experts"] = nn.ModuleList([nn.Linear(32, 32) for _ in range(2)])
    fp8.export(fp8.convert(model, "row"), tmp_path)
    config = json.loads((tmp_path / "fp8.json").read_text())["quantization_config"]
    found = {
        name: group["input_activations"]["strategy"]
        for group in config["config_groups"].values()
        for name in group["targets"]
    }
    assert found == {
        "layers.0.dense": "group",
        "layers.0.experts.0": "token",
        "layers.0.experts.1": "token",
    }


def test_one_layout_in_a_file(tmp_path):
    recipes = "tensor", "mxfp8"
    parts = [fp8.convert(linears(32, 32), name) for name in recipes]
    report = fp8.export(nn.Sequential(*parts), tmp_path)
    assert [row.done for row in report] == ["FP8", "left alone"]
    assert "layout 'float-quantized' and no other" in report[1].why


def test_a_model_of_ones_own(tmp_path):
    head = nn.Linear(16, 32, bias=False)
    model = Net(embed=nn.Embedding(32, 16), layer=nn.Linear(16, 16), head=head)
    head.weight = model.embed.weight
    fp8.convert(model, "row")
    report = by_path(fp8.export(torch.compile(model), tmp_path))
    assert report["layer"].done == "FP8"
    assert report["head"].why == "its weight is tied to another module's"
    stored = safetensors.load_file(tmp_path / "model.safetensors")
    about = json.loads((tmp_path / "fp8.json").read_text())
    assert about["tied"] == {"head.weight": "embed.weight"}
    assert about["quantization_config"]["ignore"] == ["head"]
    named = "embed.weight layer.weight layer.weight_scale layer.bias"
    assert set(stored) == set(named.split())
    product = stored["layer.weight"].float() * stored["layer.weight_scale"]
    bias, identity = model.layer.bias, torch.eye(16)
    assert_same(model.layer(identity) - bias, product.T + bias - bias)


@parametrize(
    "make, message",
    [
        (llama, r"fp8\.convert was not called"),
        (
            lambda: fp8.convert(llama(), "mxfp6"),
            "no layout for recipe 'mxfp6': e2m3, mx; convert",
        ),
        (
            lambda: fp8.convert(nn.Sequential(nn.Conv2d(16, 16, 3)), "tensor"),
            "layers of this kind: it stays in high precision",
        ),
        (
            lambda: fp8.convert(hub_models.gpt2(), fp8.Policy.hidden("tensor")),
            "transposed weights: it stays in high precision",
        ),
        (
            lambda: fp8.convert(llama(), "delayed"),
            r"'delayed' has seen no .*: train the model",
        ),
        (
            lambda: fp8.convert(llama(), "static"),
            r"'static' has seen no .*: calibrate or train",
        ),
        (
            lambda: unit_scale(
                fp8.convert(llama(), "unit"),
                {nn.functional.silu: nn.functional.relu},
                batch=(IDS,),
            ),
            "Replace is no part of the weights",
        ),
        (
            lambda: fp8.convert(nn.Sequential(uu.Linear(16, 16)), "unit"),
            "0 is a module of unit_scaling",
        ),
        (lambda: simulate_fp8(llama()), "Simulate is no part of the weights"),
    ],
)
def test_refused_by_name(make, message, tmp_path):
    with refuses(message):
        fp8.export(make(), tmp_path / "folder")
    assert not list(tmp_path.iterdir())
