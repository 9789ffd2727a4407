"""Which values of a checkpoint share a scale: by its configuration, by its shapes, or an error.

The reference finds the scale of each number alone, in float64."""

import copy
import json
from collections import namedtuple

import pytest
import torch
from torch import nn

import fp8
from tests.fp8.checkpoints.reading import compressed_tensors
from tests.shared import (
    Net,
    assert_close,
    assert_same,
    normal,
    pairs,
    parametrize,
    refuses,
    sampled,
    saved,
    seeded,
    theirs,
)

safetensors = pytest.importorskip("safetensors.torch")

FP8 = torch.float8_e4m3fn
E2M1 = [sign * x for sign in (1, -1) for x in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]


File = namedtuple("File", "tensors config codes scales")
"""The tensors of a layer "0" and their quantization_config, with the numbers in float64: codes, and
scales, one for each block."""


def numbers(shape, seed=0):
    return 20 * normal(*shape, seed=seed)


def grid(shape, block):
    """Scales that differ by more than the rounding of any of the formats that store them."""
    rows, columns = (-(-n // by) for n, by in pairs(shape, block))
    return 2.0 ** (torch.arange(rows * columns).reshape(rows, columns) % 29 - 14.0)


def arguments(block, bits):
    """A configuration of compressed-tensors."""
    weights = {"num_bits": bits, "type": "float", "strategy": "group"}
    if block[0] == 1:
        weights["group_size"] = block[1]
    else:
        weights |= {"strategy": "block", "block_structure": list(block)}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "config_groups": groups}


def deepseek(shape, block):
    codes, scales = numbers(shape).to(FP8), grid(shape, block) * 1.1
    config = {"quant_method": "fp8", "weight_block_size": list(block)}
    tensors = {"0.weight": codes, "0.weight_scale_inv": scales}
    return File(tensors, config, codes.double(), scales.double())


def deepseek_ue8m0(shape, block):
    file, scales = deepseek(shape, block), grid(shape, block)
    tensors = file.tensors | {"0.weight_scale_inv": scales.to(torch.float8_e8m0fnu)}
    return file._replace(tensors=tensors, scales=scales.double())


def float_quantized(shape, block):
    codes = numbers(shape).to(torch.float8_e5m2)
    scales = (grid(shape, block) * 1.1).bfloat16()
    tensors = {"0.weight": codes, "0.weight_scale": scales}
    return File(tensors, arguments(block, 8), codes.double(), scales.double())


def mxfp8(shape, block):
    file, scales = float_quantized(shape, block), grid(shape, block)
    tensors = file.tensors | {"0.weight_scale": (scales.log2() + 127).to(torch.uint8)}
    return file._replace(tensors=tensors, scales=scales.double())


def mxfp4(shape, block):
    scales, generator = grid(shape, block), seeded(1)
    codes = torch.randint(16, shape, generator=generator, dtype=torch.uint8)
    tensors = {
        "0.weight_packed": codes[:, ::2] + 16 * codes[:, 1::2],
        "0.weight_scale": (scales.log2() + 127).to(torch.uint8),
    }
    values = torch.tensor(E2M1, dtype=torch.float64)[codes.long()]
    return File(tensors, arguments(block, 4), values, scales.double())


def nvfp4(shape, block):
    file = mxfp4(shape, block)
    scales = (grid(shape, block).clamp(2**-6, 2**8) * 1.5).to(FP8)
    tensors = {"0.weight_scale": scales, "0.weight_global_scale": torch.tensor([0.75])}
    return file._replace(tensors=file.tensors | tensors, scales=scales.double() / 0.75)


LAYOUTS = [deepseek, deepseek_ue8m0, float_quantized, mxfp8, mxfp4, nvfp4]
SHAPES = [(192, 192), (200, 400), (576, 100), (97, 50), (50, 288), (130, 96)]
BLOCKS = [
    (128, 128),
    (96, 96),
    (50, 50),
    (192, 192),
    (100, 100),
    (96, 50),
    (1, 96),
    (1, 32),
    (1, 7),
]


def reference(file, block):
    """Each number times the scale of its block, rounded once to float32."""
    rows, columns = (torch.arange(n) // by for n, by in pairs(file.codes.shape, block))
    return (file.codes * file.scales[rows[:, None], columns[None]]).float()


def layer(shape):
    return nn.Sequential(nn.Linear(shape[1], shape[0], bias=False))


@sampled(3)
@parametrize("block", BLOCKS)
@parametrize("shape", SHAPES)
@parametrize("make", LAYOUTS)
def test_blocks_of_the_configuration(make, shape, block, tmp_path):
    """Any block, whose last one is full or not, frozen or not, from a folder, a file beside its
    config.json, and a state_dict; and again from the state_dict of the loaded model."""
    file = make(shape, block)
    # NVFP4's quotient of scales is rounded once more.
    rtol = 2.0**-23 if make is nvfp4 else 0.0
    want = reference(file, block)
    path = tmp_path / "model.safetensors"
    safetensors.save_file(file.tensors, path)
    (tmp_path / "config.json").write_text(
        json.dumps({"quantization_config": file.config})
    )
    for source, config in ((tmp_path, None), (path, None), (file.tensors, file.config)):
        for frozen in (True, False):
            model = fp8.load(layer(shape), source, frozen=frozen, config=config)
            assert_close(model[0].weight.detach() * 1, want, rtol=rtol, atol=0)
    state = fp8.load(layer(shape), tmp_path).state_dict()
    again = fp8.load(layer(shape), state)[0].weight
    assert_close(again.detach() * 1, want, rtol=rtol, atol=0)
    for each in (again, copy.deepcopy(again), saved(again), again.mT, again.bfloat16()):
        assert fp8.FORMATS[each.format].dtype == each.stored.dtype
        assert each.stored.itemsize == 1


def ceil(n, by):
    return (n + by - 1) // by


def test_without_a_configuration_shapes_decide_if_they_admit_one_answer():
    """All numbers of rows and scales up to 20: an answer for exactly those that one block fits."""
    answers = 0
    for n in range(2, 21):
        for count in range(1, n + 2):
            fit = {by for by in range(1, n + 1) if ceil(n, by) == count}
            codes = torch.ones(n, 3).to(FP8)
            scales = torch.arange(1.0, count + 1)[:, None].expand(-1, 3)
            state = {"0.weight": codes, "0.weight_scale_inv": scales}
            if count == 1 or len(fit) == 1:
                by = n if count == 1 else fit.pop()
                weight = fp8.load(layer((n, 3)), state)[0].weight.dequantize()
                assert weight[:, 0].tolist() == [float(i // by + 1) for i in range(n)]
                answers += 1
            else:
                match = rf"of shape \({n}, 3\) has scales.*weight_block_size"
                with refuses(match):
                    fp8.load(layer((n, 3)), state)
    assert answers > 60


@parametrize(
    "make, group", [(mxfp8, 32), (mxfp4, 32), (nvfp4, 16), (deepseek_ue8m0, 32)]
)
def test_formats_define_their_groups(make, group):
    file = make((64, 96), (1, group))
    weight = fp8.load(layer((64, 96)), file.tensors)[0].weight.dequantize()
    assert_close(weight, reference(file, (1, group)), rtol=2.0**-23, atol=0)


@parametrize("make", LAYOUTS)
def test_scales_unlike_the_configuration_are_refused(make):
    """Blocks of another size, and one scale where several are configured."""
    shape, block = (192, 384), (1, 96)
    file = make(shape, block)
    other = make(shape, (1, 64)).config
    name = next(name for name in file.tensors if "weight_scale" in name)
    one = file.tensors | {name: file.tensors[name][:1, :1]}
    for tensors, config, size in ((file.tensors, other, 64), (one, file.config, 96)):
        with refuses(rf"not one for each block of 1 x {size}: pass config="):
            fp8.load(layer(shape), tensors, config=config)


@parametrize("make", LAYOUTS)
@parametrize("said", [True, False])
def test_a_missing_scale_is_an_error(make, said, tmp_path):
    """By the names of the weight and of what was looked for, and with the method. The second level
    of NVFP4 is a scale too. Nothing is loaded."""
    shape, block = (96, 192), (1, 96)
    file = make(shape, block)
    config = file.config if said else None
    method = repr(file.config["quant_method"] if said else None)
    for absent in [name for name in file.tensors if "scale" in name]:
        tensors = {name: x for name, x in file.tensors.items() if name != absent}
        if any("global" in name for name in tensors):
            continue  # a divisor alone is no scale either: next test
        safetensors.save_file(tensors, tmp_path / "model.safetensors")
        if said:
            about = json.dumps({"quantization_config": config})
            (tmp_path / "config.json").write_text(about)
        for frozen in (True, False):
            model = layer(shape)
            before = model[0].weight.detach().clone()
            for source, given in ((tmp_path, None), (tensors, config)):
                with refuses(rf"0\.weight .*without a scale.*{method}") as e:
                    fp8.load(model, source, frozen=frozen, config=given)
                assert absent in str(e.value)
            assert_same(model[0].weight, before)


def test_other_missing_scales():
    """A divisor alone; codes in integers; scales under a name that no layout has."""
    file = nvfp4((64, 96), (1, 16))
    tensors = {name: x for name, x in file.tensors.items() if name != "0.weight_scale"}
    codes = {"0.weight": torch.ones(64, 96, dtype=torch.int32)}
    for dtype, given in ((torch.uint8, tensors), (torch.int32, codes)):
        with refuses(rf"0\.weight is stored in {dtype} without a scale"):
            fp8.load(layer((64, 96)), given)
    file = deepseek((64, 96), (32, 32))
    tensors = {
        "0.weight": file.tensors["0.weight"],
        "0.scales": file.tensors["0.weight_scale_inv"],
    }
    with refuses(r"unexpected: 0\.scales"):
        fp8.load(layer((64, 96)), tensors, config=file.config, unscaled=True)


@parametrize("frozen", [True, False])
@parametrize("dtype", [FP8, torch.float8_e5m2])
def test_weights_that_were_only_cast(dtype, frozen):
    """By their own word. A model whose parameters are in FP8 keeps the codes."""
    values = numbers((4, 6)).to(dtype)
    model = fp8.load(layer((4, 6)), {"0.weight": values}, frozen=frozen, unscaled=True)
    assert_same(model[0].weight.detach() * 1, values.float())
    model = layer((4, 6))
    model[0].weight = nn.Parameter(torch.zeros(4, 6).to(dtype), requires_grad=False)
    fp8.load(model, {"0.weight": values}, frozen=frozen)
    assert model[0].weight.dtype == dtype
    assert_same(model[0].weight.float(), values.float())


def attention():
    """Layers that configurations tell apart by name, by pattern and by class."""
    return Net(**{f"{n}_proj": nn.Linear(192, 192, bias=False) for n in "qkvo"})


@theirs
@parametrize("order", [1, -1])
def test_groups_of_compressed_tensors(order):
    """Each layer has the blocks that the library gives it; it decompresses the reference."""
    compressors, quantization = compressed_tensors()
    settings = {
        "q_proj": {"strategy": "group", "group_size": 96},
        "re:[qk]_proj": {"strategy": "block", "block_structure": [96, 50]},
        "re:v.*": {"strategy": "tensor"},
        "Linear": {"strategy": "group", "group_size": 48},
    }
    groups = {
        f"group_{i}": {
            "targets": [target],
            "weights": {"num_bits": 8, "type": "float"} | weights,
        }
        for i, (target, weights) in enumerate(list(settings.items())[::order])
    }
    config = quantization.QuantizationConfig(
        config_groups=groups, format="float-quantized"
    )
    model = attention()
    quantization.apply_quantization_config(model, config)
    for module in model.children():
        module.weight_scale.data = torch.rand_like(module.weight_scale) / 100 + 0.001
        compressors.compress_module(module)
    file = json.loads(config.model_dump_json())
    state = {name: x.clone() for name, x in model.state_dict().items()}
    loaded = fp8.load(attention(), state, config=file)
    for name, module in model.named_children():
        compressors.decompress_module(module)
        assert torch.equal(getattr(loaded, name).weight.dequantize(), module.weight), (
            name
        )
    with refuses(r"_proj\.weight of shape .* has scales of shape"):
        fp8.load(attention(), state)


@theirs
@parametrize("rows", [(64, 128), (128, 64), (96, 96), (192, 96), (40, 24, 8)])
def test_parts_that_were_fused_after_they_were_scaled(rows):
    """Parts of unlike sizes, each with a scale of its own, in one weight: their number fits several
    blocks, and no part takes the rows of another one. With a scale for each row it is decided."""
    n = sum(rows)
    model, codes = layer((n, 64)), {"0.weight": torch.ones(n, 64).to(FP8)}
    scales = torch.arange(1.0, len(rows) + 1)
    want = scales.repeat_interleave(torch.tensor(rows))[:, None].expand(-1, 64)
    for scale in (scales, scales[:, None]):
        for config in (None, {"quant_method": "fbgemm_fp8"}):
            with refuses(rf"0\.weight of shape \({n}, 64\)"):
                fp8.load(model, codes | {"0.weight_scale": scale}, config=config)
    fp8.load(model, codes | {"0.weight_scale": want[:, :1]})
    assert_same(model[0].weight.dequantize(), want)


def test_experts_in_one_tensor():
    """Blocks of the last two dimensions; a scale for each expert; groups for layers of a class."""

    class Experts(Net):
        def __init__(self):
            super().__init__(up=nn.Parameter(torch.zeros(3, 100, 96)))

    codes = numbers((300, 96)).reshape(3, 100, 96).to(FP8)
    wide = codes.float()
    groups = arguments((1, 48), 8)
    groups["config_groups"]["group_0"]["targets"] = ["Experts"]
    for block, config in (
        ((50, 96), {"weight_block_size": [50, 96]}),
        ((1, 48), groups),
    ):
        scales = torch.rand(3, 100 // block[0], 96 // block[1])
        want = wide * scales.repeat_interleave(block[0], 1).repeat_interleave(
            block[1], 2
        )
        experts = fp8.load(Experts(), {"up": codes, "up_scale": scales}, config=config)
        assert_same(experts.up.dequantize(), want)
    each = torch.rand(3, 1, 1)
    experts = fp8.load(Experts(), {"up": codes, "up_scale": each.flatten()})
    assert_same(experts.up.dequantize(), wide * each)
    config = arguments((1, 48), 8)  # of linear layers: it says nothing of these
    with refuses("fit no block size, or several"):
        scales = torch.rand(3, 100, 2)
        fp8.load(Experts(), {"up": codes, "up_scale": scales}, config=config)


def test_configurations_are_dicts():
    file = deepseek((96, 96), (48, 48))
    for config in ([48, 48], "config.json"):
        with refuses("config is a quantization_config as a dict or None", TypeError):
            fp8.load(layer((96, 96)), file.tensors, config=config)
