"""`fp8.load`: files of `fp8.export` and of other libraries, which are the oracles."""

import copy
import json

import pytest
import torch
from torch import nn

import fp8
from tests.fp8.checkpoints.reading import same
from tests.shared import (
    Net,
    assert_same,
    descend,
    linears,
    normal,
    pairs,
    parametrize,
    proves,
    refuses,
    saved,
    theirs,
)
from unit_scaling.transforms import unit_scale

safetensors = pytest.importorskip("safetensors.torch")

each_layout = parametrize("recipe", "tensor row block mxfp8".split())
X = normal(8, 256, seed=1)


LAYERS = ("first", "second")


def net(seed=0, dtype=torch.float32):
    """A tie, a buffer, a norm, and layers of full blocks and of a part of one."""
    torch.manual_seed(seed)
    model = Net(
        lambda m, x: m.head(m.norm(m.second(m.first(x).relu()))),
        first=nn.Linear(256, 128, dtype=dtype),
        second=nn.Linear(128, 64, bias=False, dtype=dtype),
        norm=nn.LayerNorm(64, dtype=dtype),
        embed=nn.Embedding(32, 64, dtype=dtype),
        head=nn.Linear(64, 32, bias=False, dtype=dtype),
    )
    model.head.weight = model.embed.weight
    model.register_buffer("steps", torch.tensor(3))
    return model


def converted(model, recipe):
    return fp8.convert(model, recipe, where=lambda name, _: name in LAYERS)


def exported(recipe, folder):
    """A model under a recipe that has run, and is exported."""
    model = converted(net(), recipe)
    model(X)
    fp8.export(model, folder)
    return model


@parametrize(
    "recipe, frozen",
    [
        *(
            (name, True)
            for name in "unit tensor static delayed row block mxfp8".split()
        ),
        ("mxfp8", False),
    ],
)
def test_what_export_writes(recipe, frozen, tmp_path):
    """Frozen or not, the weights are the same, and another export writes the same ones."""
    model = exported(recipe, tmp_path)
    other = fp8.load(net(2), tmp_path, frozen=not frozen)
    again = net(seed=1)
    tied = again.head.weight is again.embed.weight
    assert fp8.load(again, tmp_path, frozen=frozen) is again
    for name in LAYERS:
        weight = again.get_submodule(name).weight
        assert_same(weight.detach() * 1, other.get_submodule(name).weight.detach() * 1)
        assert isinstance(weight, fp8.ScaledTensor) is frozen
        assert weight.requires_grad is not frozen
        if frozen:
            assert weight.stored.dtype == torch.float8_e4m3fn
            assert weight.numel() <= weight.nbytes <= 1.25 * weight.numel() + 4
    for name in "first.bias norm.weight embed.weight steps".split():
        assert_same(again.state_dict()[name], model.state_dict()[name])
    assert tied
    assert again.head.weight is again.embed.weight
    assert again.embed.weight.requires_grad
    if recipe in ("static", "delayed"):
        return  # their scales are in a history, which no file of an export has
    fp8.export(converted(again, recipe), tmp_path / "2")
    files = [path / "model.safetensors" for path in (tmp_path, tmp_path / "2")]
    first, second = map(safetensors.load_file, files)
    assert first.keys() == second.keys()
    third = fp8.load(net(2), tmp_path / "2")
    for name in LAYERS:
        values = [m.get_submodule(name).weight.detach() * 1 for m in (again, third)]
        assert_same(*values)
    # A block whose largest value is rounded down to 448 units gets the smaller scale next time.
    assert recipe == "mxfp8" or all(same(first[name], second[name]) for name in first)


def test_shards(tmp_path):
    """And a tie of the file that a model lacks."""
    exported("row", tmp_path)
    tensors, where = (
        safetensors.load_file(tmp_path / "model.safetensors"),
        tmp_path / "s",
    )
    where.mkdir()
    index = {}
    for i, (name, tensor) in enumerate(tensors.items()):
        index[name] = f"{i}.safetensors"
        safetensors.save_file({name: tensor}, where / index[name])
    about = json.dumps({"weight_map": index})
    (where / "model.safetensors.index.json").write_text(about)
    got, want = fp8.load(net(2), where), net(1)
    want.head.weight = nn.Parameter(torch.zeros(32, 64))
    fp8.load(want, str(tmp_path))
    assert_same(got.first.weight.stored.float(), want.first.weight.stored.float())
    assert_same(got(X), want(X))
    assert want.head.weight is not want.embed.weight


@theirs
@parametrize("flat", [False, True])
@parametrize("rows", [False, True])
def test_torchao(rows, flat):
    """Float8Tensor, in a state_dict and as its safetensors support names the parts."""
    quantization = pytest.importorskip("torchao.quantization")
    model = net()
    per = quantization.PerRow() if rows else quantization.PerTensor()
    for name in LAYERS:
        layer = model.get_submodule(name)
        weight = quantization.Float8Tensor.from_hp(
            layer.weight.detach(), granularity=per
        )
        layer.weight = nn.Parameter(weight, requires_grad=False)
    state = model.state_dict()
    if flat:
        support = pytest.importorskip(
            "torchao.prototype.safetensors.safetensors_support"
        )
        state, _ = support.flatten_tensor_state_dict(
            {name: tensor for name, tensor in state.items() if name != "steps"}
        )
        state["steps"] = torch.tensor(3)
    for frozen in (True, False):
        again = fp8.load(net(1), state, frozen=frozen)
        for name in LAYERS:
            want = model.get_submodule(name).weight.dequantize()
            assert_same(again.get_submodule(name).weight.detach() * 1, want)


def test_meta_parameters_get_memory(tmp_path):
    exported("row", tmp_path)
    want = fp8.load(net(1), tmp_path)
    with torch.device("meta"):
        model = net(1)
    model.head.weight.tag = "tied"
    model.steps = torch.tensor(0)
    fp8.load(model, tmp_path)
    assert_same(model(X), want(X))
    assert model.head.weight is model.embed.weight
    assert model.head.weight.tag == "tied"


@each_layout
def test_a_frozen_weight_is_a_tensor(recipe, tmp_path):
    """Views, copies, files and writes of a weight with its own scales for tiles are those of the
    numbers that it stands for."""
    exported(recipe, tmp_path)
    model = fp8.load(net(1), tmp_path)
    weight = model.first.weight
    want = weight.dequantize()
    views = torch.t, lambda x: x[3:70], lambda x: x.t()[5:9], torch.flatten
    for view in views:
        assert_same(view(weight.detach()) * 1, view(want))
        assert_same(saved(view(weight.detach())), view(want))
    for again in (copy.deepcopy(weight), saved(weight)):
        assert_same(again.stored.float(), weight.stored.float())
        assert_same(again.dequantize(), want)
    other = fp8.load(net(2), tmp_path)
    other.first.weight.data.mul_(2)
    other.load_state_dict(model.state_dict())
    assert_same(other.first.weight.stored.float(), weight.stored.float())
    with torch.no_grad():
        weight.t()[0].add_(1.0)
    want[:, 0] += 1
    assert_same(weight.dequantize(), want)
    weight.store()
    rounded = fp8.quantize(want, "e4m3", scale=weight.memory.scales())
    assert_same(weight.dequantize(), rounded)


@proves("the field", "FP8 checkpoints loaded, for LoRA", how="library")
@theirs
@parametrize("recipe", ["row", "mxfp8"])
def test_lora_on_a_checkpoint(recipe, tmp_path):
    """Loaded, trained by PEFT, merged, and exported in the layout that it came in."""
    peft = pytest.importorskip("peft")
    exported(recipe, tmp_path)
    base = fp8.load(net(1), tmp_path)
    wide = fp8.load(net(1), tmp_path, frozen=False)
    config = peft.LoraConfig(r=4, target_modules=list(LAYERS))
    models = []
    for start in (base, wide):
        torch.manual_seed(2)
        model = peft.get_peft_model(start, config)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2)
        descend(optimizer, (model(X).square().mean() for _ in range(3)))
        models.append(model)
    assert_same(models[0](X), models[1](X))
    stored = models[0].base_model.model.first.base_layer.weight
    assert stored.stored.dtype == torch.float8_e4m3fn
    merged, plain = (model.merge_and_unload() for model in models)
    assert_same(merged.first.weight.dequantize(), plain.first.weight)
    files = [tmp_path / "merged", tmp_path / "plain"]
    for model, folder in pairs((merged, plain), files):
        fp8.export(converted(model, recipe), folder)
    assert len({(folder / "model.safetensors").read_bytes() for folder in files}) == 1
    fp8.store_frozen(fp8.revert(merged))
    assert merged.first.weight.stored.dtype == torch.float8_e4m3fn


FP8 = torch.ones(2, 256).to(torch.float8_e4m3fn)
UNREADABLE = [
    ({"second.weight": None, "second.weight_scale": None}, "missing: second.weight$"),
    ({"third.weight": torch.ones(2)}, "unexpected: third.weight"),
    ({"norm.weight_scale": torch.ones(1)}, "norm.weight is stored in torch.float32"),
    (
        {"first.weight": FP8, "first.weight_scale": torch.ones(1)},
        r"first.weight has shape \(2, 256\) in the checkpoint, \(128, 256\) in the model",
    ),
    (
        {"first.weight_scale": torch.ones(5, 1)},
        r"first.weight of shape \(128, 256\) has scales of shape \(5, 1\)",
    ),
    ({"first.weight_scale": torch.ones(2)}, r"has scales of shape \(2,\)"),
    ({"first.weight": torch.ones(128, 256).to(torch.int8)}, "is stored in torch.int8"),
    (
        {"head.weight": torch.ones(32, 64)},
        "embed.weight and head.weight are one parameter",
    ),
    (
        {
            "embed.weight": torch.ones(32, 64).to(FP8.dtype),
            "head.weight": torch.ones(32, 64).to(FP8.dtype),
            "embed.weight_scale": torch.ones(1),
            "head.weight_scale": torch.full((1,), 2.0),
        },
        "embed.weight and head.weight are one parameter",
    ),
    (
        {"first.weight_scale": None},
        "first.weight is stored in torch.float8_e4m3fn without a scale",
    ),
]


def test_refused_by_name(tmp_path):
    exported("row", tmp_path)
    state = safetensors.load_file(tmp_path / "model.safetensors")
    model = net(1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for changed, message in UNREADABLE:
        source = {k: v for k, v in (state | changed).items() if v is not None}
        with refuses(message):
            fp8.load(model, source)
    with refuses(r"weight of torch\.float64 cannot be frozen"):
        fp8.load(net(1).double(), state)
    with torch.device("meta"):
        meta = linears(2, 2)
        meta.register_buffer("cache", torch.ones(2), persistent=False)
    with refuses("cache is on the meta device"):
        fp8.load(meta, {"0.weight": torch.ones(2, 2), "0.bias": torch.ones(2)})
    with refuses("a path or a state_dict, not a int", TypeError):
        fp8.load(model, 3)
    with refuses(r"an nn\.Module, got str", TypeError):
        fp8.load("model", tmp_path)
    with refuses(r"found no file .*absent"):
        fp8.load(model, tmp_path / "absent")
    assert_same(model.state_dict(), before)
    assert not isinstance(model.first.weight, fp8.ScaledTensor)


def test_weights_loaded_before_the_first_call_of_unit_scale_stay(tmp_path):
    exported("row", tmp_path)
    plain = fp8.load(net(1), tmp_path, frozen=False)
    model = fp8.load(unit_scale(net(1)), tmp_path, frozen=False)
    assert_same(model(X), plain(X))
    assert_same(model.state_dict(), plain.state_dict())


def test_exponents_and_scales_of_activations():
    """The last are left in the file."""
    layer = nn.Sequential(nn.Linear(4, 2, bias=False))
    one = torch.ones(2, 4).to(torch.float8_e4m3fn)
    bits = torch.tensor([[0], [255]], dtype=torch.uint8)
    extra = {"0.input_scale": torch.ones(1), "attn.k_scale": torch.ones(1)}
    fp8.load(layer, {"0.weight": one, "0.weight_scale": bits, **extra})
    assert layer[0].weight[0].tolist() == [2.0**-127] * 4
    assert layer[0].weight[1].isnan().all()
