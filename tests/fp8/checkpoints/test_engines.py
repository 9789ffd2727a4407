"""What is written for engines, read back by them where they install, and else by their definitions
of the order of scales."""

import pytest
import torch
from torch import nn

import fp8
from fp8.casts.casting import rounded
from fp8.checkpoints.layouts import LAYOUTS, ORDERS
from fp8.checkpoints.writing import unfit
from fp8.recipes.recipe import RECIPES
from tests.fp8.adapters.hub_models import quiet, transformers  # noqa: F401
from tests.fp8.checkpoints.reading import exact, loaded
from tests.fp8.kernels import scaled_mm
from tests.fp8.kernels.scaled_mm import unswizzled
from tests.shared import (
    Net,
    assert_same,
    normal,
    parametrize,
    proves,
    refuses,
    theirs,
)

#: Layout of linear layers -> a recipe that it has.
WRITTEN = {
    name: next(r for r in RECIPES if not unfit(RECIPES[r], row))
    for name, row in LAYOUTS.items()
    if not row.stacked
}
FILES = [name for name in WRITTEN if LAYOUTS[name].place == "file"]


def linear(outputs, inputs, seed, bias=False):
    layer = nn.Linear(inputs, outputs, bias=bias)
    # Unlike magnitudes: blocks, rows and layers have unlike scales.
    ramp = torch.logspace(-2, 1, outputs)[:, None] * 2.0 ** (seed % 5)
    layer.weight.data = normal(outputs, inputs, seed=seed) * ramp
    return layer


def mlp(width, inner, seed):
    return Net(
        gate_proj=linear(inner, width, seed),
        up_proj=linear(inner, width, seed + 1),
        down_proj=linear(width, inner, seed + 2),
    )


def decoder(experts=True):
    """Layers of the names and shapes that engines fuse: grouped queries, biases, a list of
    experts."""
    sizes = {"q_proj": 256, "k_proj": 128, "v_proj": 128}
    parts = {
        name: linear(n, 640, n + i, True) for i, (name, n) in enumerate(sizes.items())
    }
    block = Net(
        self_attn=Net(**parts, o_proj=linear(640, 256, 3)), mlp=mlp(640, 256, 4)
    )
    if experts:
        block.moe = Net(
            experts=nn.ModuleList(mlp(640, 128, 10 * i) for i in range(1, 4))
        )
    return Net(layers=nn.ModuleList([block]), norm=nn.LayerNorm(640))


def cast_of(model, *names):
    """What the recipe of layers makes of their weights, one after the other."""
    layers = [model.get_submodule(name) for name in names]
    weight = torch.cat([layer.weight.detach() for layer in layers])
    return rounded(weight, layers[0].fp8_recipe.weight)[0]


# The definitions of engines


def unpacked(scale, inputs):
    """DeepGEMM: byte j of column c has the exponent of block 4 c + j; column by column, each of
    rows padded to 16 bytes (csrc/utils/layout.hpp, tests/test_layout.py)."""
    outputs, aligned = scale.shape[0], -(-scale.shape[0] // 4) * 4
    assert scale.dtype == torch.int32
    flat = scale.as_strided((aligned * scale.shape[1],), (1,)).tolist()
    blocks = -(-inputs // 128)
    exponents = [
        [(flat[b // 4 * aligned + i] >> 8 * (b % 4) & 255) - 127 for b in range(blocks)]
        for i in range(outputs)
    ]
    return 2.0 ** torch.tensor(exponents).repeat_interleave(128, 1)[:, :inputs]


def weight_of(tensors, name, layout):
    """A weight of an engine's memory."""
    row = LAYOUTS[layout]
    parts = {p: tensors[name + "." + f.format("weight")] for p, f in row.forms.items()}
    values, scale = parts["values"], parts["scale"]
    if layout == "block_sm90":
        wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        return values.float() * wide
    if layout == "block_sm100":
        return values.float() * unpacked(scale, values.shape[1])
    outputs, inputs = values.shape[0], 2 * values.shape[1]
    steps = unswizzled(scale, outputs, inputs // 16).float() / parts["divisor"]
    codes = scaled_mm.values(values.view(torch.float4_e2m1fn_x2)).float()
    return codes * steps.repeat_interleave(16, 1)


MEMORY = [name for name in WRITTEN if LAYOUTS[name].place == "memory"]


@parametrize("layout", MEMORY)
def test_memory_of_an_engine(layout):
    """Fused layers are their parts one after the other, under one cast; biases too."""
    model = fp8.convert(decoder(bool(LAYOUTS[layout].experts)), WRITTEN[layout])
    stream = fp8.weights(model, layout=layout)
    tensors = dict(stream)
    assert {n: (tuple(x.shape), x.dtype) for n, x in tensors.items()} == stream.manifest
    attention = [f"layers.0.self_attn.{n}_proj" for n in "qkv"]
    fused = {
        "layers.0.self_attn.qkv_proj": attention,
        "layers.0.self_attn.o_proj": ["layers.0.self_attn.o_proj"],
        "layers.0.mlp.gate_up_proj": ["layers.0.mlp.gate_proj", "layers.0.mlp.up_proj"],
        "layers.0.mlp.down_proj": ["layers.0.mlp.down_proj"],
    }
    for name, parts in fused.items():
        want = cast_of(model, *parts)
        # NVFP4's unit is stored as its inverse.
        rtol = 2.0**-22 if layout == "nvfp4_sm100" else 0
        torch.testing.assert_close(
            weight_of(tensors, name, layout), want, rtol=rtol, atol=0
        )
    biases = [model.get_submodule(name).bias for name in attention]
    assert_same(tensors["layers.0.self_attn.qkv_proj.bias"], torch.cat(biases).detach())
    assert not [name for name in tensors if "q_proj" in name or ".up_proj" in name]


@parametrize("layout", ["block_sm90", "block_sm100"])
def test_memory_of_experts(layout):
    model = fp8.convert(decoder(), "block")
    tensors = dict(fp8.weights(model, layout=layout))
    path = "layers.0.moe.experts"
    for stem, parts in (("w13", ("gate_proj", "up_proj")), ("w2", ("down_proj",))):
        values = tensors[f"{path}.{stem}_weight"]
        scale = tensors[f"{path}.{stem}_weight_scale_inv"]
        assert values.shape[0] == scale.shape[0] == 3
        for i in range(3):
            each = {"e.weight": values[i], "e.weight_scale_inv": scale[i]}
            names = [f"{path}.{i}.{part}" for part in parts]
            assert_same(weight_of(each, "e", layout), cast_of(model, *names))


@parametrize("n", [1, 3, 4, 130, 2624])
@parametrize("blocks", [1, 3, 4, 5, 48])
@parametrize("experts", [(), (2,)])
def test_packed_scales_as_deepgemm_checks_them(n, blocks, experts):
    """Shapes and strides of check_sf_layout (csrc/utils/layout.hpp), a single column too."""
    grid = torch.randint(-40, 40, (*experts, -(-n // 128), blocks)).exp2()
    order = ORDERS["packed"]
    packed = order.write(grid, n)
    assert tuple(packed.shape) == order.shape(grid.shape, n)
    assert tuple(packed.shape[-2:]) == (n, -(-blocks // 4))
    aligned = -(-n // 4) * 4
    assert packed.stride()[-2:] == (1, aligned) == order.stride(packed.shape)
    if experts:
        assert packed.stride(0) == aligned * packed.shape[-1]
        packed, grid = packed[1], grid[1]
    want = grid.repeat_interleave(128, 0)[:n]
    assert_same(unpacked(packed, 128 * blocks)[:, ::128], want)


# Files


@parametrize("layout", FILES)
def test_files_load(layout, tmp_path):
    """The weights of `fp8.load` are those of the recipe, under shared units."""
    model = fp8.convert(decoder(), WRITTEN[layout])
    fp8.export(model, tmp_path, layout=layout)
    found = fp8.load(decoder(), tmp_path)
    names = [f"layers.0.self_attn.{n}_proj" for n in "qkv"]
    got = torch.cat([found.get_submodule(name).weight.dequantize() for name in names])
    want = cast_of(model, *names)
    if not LAYOUTS[layout].shared:
        want = torch.cat([cast_of(model, name) for name in names])
    rtol = 2.0**-22 if layout == "nvfp4" else 0
    torch.testing.assert_close(got, want, rtol=rtol, atol=0)


@theirs
@parametrize("recipe", ["nvfp4", "nvfp4_nvidia", "mxfp4", "mxfp8", "row", "tensor"])
def test_compressed_tensors_decompresses(recipe):
    """To the bit, in bfloat16 for formats that it unpacks to it."""
    model = fp8.convert(
        decoder(), exact(recipe) if recipe in ("row", "tensor") else recipe
    )
    stream = fp8.weights(model)
    tensors = {name: x.clone() for name, x in stream}
    plain = loaded(decoder(), tensors, stream.config)
    layout = LAYOUTS[recipe.partition("_")[0]]
    for names in (
        ["layers.0.self_attn.o_proj"],
        [f"layers.0.self_attn.{n}_proj" for n in "qkv"],
        [f"layers.0.moe.experts.1.{n}_proj" for n in ("gate", "up")],
    ):
        got = torch.cat([plain.get_submodule(name).weight for name in names])
        want = cast_of(model, *names)
        if not layout.shared:
            want = torch.cat([cast_of(model, name) for name in names])
        assert_same(got.detach(), want.to(got.dtype))


@proves("the field", "checkpoints for vLLM, SGLang, Transformers", how="library")
@theirs
@parametrize(
    "recipe, layout",
    [
        ("block", "block"),
        ("block", "block_ue8m0"),
        ("mxfp4", "mxfp4"),
        ("nvfp4", "nvfp4"),
        ("mxfp8", "mxfp8"),
    ],
)
def test_transformers_reads_files(recipe, layout, tmp_path):
    """To the bit, in the dtype that is asked for."""
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    model = transformers.LlamaForCausalLM(config)
    model = fp8.convert(model, fp8.Policy.hidden(recipe))
    fp8.export(model, tmp_path, layout=layout)
    options = {"dtype": torch.bfloat16}
    if LAYOUTS[layout].method == "fp8":
        how = transformers.FineGrainedFP8Config(dequantize=True)
        options |= {"quantization_config": how}
    served = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, **options)
    served(torch.arange(4)[None])  # compressed-tensors decompresses then
    path = "model.layers.0"
    for names in (
        [f"{path}.self_attn.{n}_proj" for n in "qkv"],
        [f"{path}.mlp.gate_proj", f"{path}.mlp.up_proj"],
        [f"{path}.mlp.down_proj"],
    ):
        got = torch.cat([served.get_submodule(name).weight for name in names])
        assert_same(got.detach(), cast_of(model, *names).bfloat16())


def test_model_optimizer():
    """As vLLM's ModelOptNvFp4W4A16LinearMethod takes them: codes and e4m3 scales times a float32,
    the largest magnitude of fused layers by 6 * 448; inputs without a cast."""
    model = fp8.convert(decoder(experts=False), "nvfp4")
    stream = fp8.weights(model, layout="nvfp4_modelopt")
    tensors = dict(stream)
    path = "layers.0.self_attn"
    shapes = {
        name.rpartition(".")[2]: (tuple(x.shape), x.dtype)
        for name, x in tensors.items()
        if f"{path}.q_proj.w" in name
    }
    assert shapes == {
        "weight": ((256, 320), torch.uint8),
        "weight_scale": ((256, 40), torch.float8_e4m3fn),
        "weight_scale_2": ((1,), torch.float32),
    }
    (factor,) = {tensors[f"{path}.{n}_proj.weight_scale_2"].item() for n in "qkv"}
    layers = [model.get_submodule(f"{path}.{n}_proj") for n in "qkv"]
    amax = max(layer.weight.abs().max().item() for layer in layers)
    assert factor == pytest.approx(amax / (6 * 448), rel=1e-6)
    assert stream.config == {
        "quant_method": "modelopt",
        "quant_algo": "W4A16_NVFP4",
        "ignore": [],
        "config_groups": {
            "group_0": {
                "weights": {
                    "dynamic": False,
                    "num_bits": 4,
                    "type": "float",
                    "group_size": 16,
                },
                "targets": ["Linear"],
            }
        },
    }


@theirs
def test_model_optimizer_reads_its_layout():
    """To the bit, where it is installed."""
    qtensor = pytest.importorskip("modelopt.torch.quantization.qtensor")
    model = fp8.convert(decoder(experts=False), "nvfp4")
    tensors = dict(fp8.weights(model, layout="nvfp4_modelopt"))
    name = "layers.0.self_attn.o_proj"
    values = tensors[f"{name}.weight"]
    weight = qtensor.NVFP4QTensor(torch.Size([640, 256]), torch.float32, values)
    scales = {
        "scale": tensors[f"{name}.weight_scale"],
        "double_scale": tensors[f"{name}.weight_scale_2"],
    }
    got = weight.dequantize(block_sizes={-1: 16}, **scales)
    assert_same(got, cast_of(model, name))


@parametrize("layout", [name for name in FILES if "" in LAYOUTS[name].inputs])
def test_inputs_without_a_cast(layout):
    """The recipe of weights alone has the same weights."""
    recipe = RECIPES[WRITTEN[layout]]
    alone = fp8.Recipe(name="weights alone", weight=recipe.weight)
    model = decoder(experts=False)
    both = fp8.weights(fp8.convert(model, recipe), layout=layout)
    tensors, config = dict(both), both.config
    one = fp8.weights(fp8.convert(model, alone), layout=layout)
    assert_same(dict(one), tensors)
    assert one.config == config
    alone = fp8.Recipe(name="alone", weight=RECIPES["row"].weight)
    with refuses("layout 'row' has no recipe 'alone': an input without a cast; "):
        fp8.weights(fp8.convert(model, alone), layout="row")


@parametrize(
    "recipe, layout, message",
    [
        ("row", "block_sm100", "has no recipe 'row': e4m3, row.*'block' first"),
        ("deepseek_v3", "block_ue8m0", "whose scales are no powers of two; .*'block'"),
        (
            "mxfp8",
            "nvfp4_modelopt",
            "'nvfp4_modelopt' has no recipe 'mxfp8': .*'nvfp4'",
        ),
        ("nvfp4", "nvfp4_sm100", "has no experts, as layers.0.moe.experts.0"),
        ("mxfp4", "mxfp4_blocks", "has stacks of experts alone"),
        ("block", "blocks", "layout.*block_sm100"),
    ],
)
def test_recipes_without_a_place(recipe, layout, message, tmp_path):
    with refuses(message):
        fp8.weights(fp8.convert(decoder(), recipe), layout=layout)


def test_memory_is_not_exported(tmp_path):
    with refuses("layout of files.*'block'"):
        fp8.export(fp8.convert(decoder(), "block"), tmp_path, layout="block_sm100")


def test_fused_layers_have_one_recipe():
    for other in ("bf16", "deepseek_v3"):
        policy = fp8.Policy("block", rules=[("*k_proj", None, other)])
        with refuses(r"qkv_proj has .*\.q_proj and .*\.k_proj under unlike casts"):
            fp8.weights(fp8.convert(decoder(), policy), layout="block_sm90")
    model = decoder()
    model.layers[0].self_attn.k_proj.bias = None
    with refuses(r"qkv_proj has a bias in .*q_proj, .*v_proj alone"):
        fp8.weights(fp8.convert(model, "block"), layout="block_sm90")
