"""What an engine would not take is named, by the mismatches that were reported of engines."""

import json
import re

import pytest
import torch
from torch import nn

import fp8
from fp8.__main__ import main
from fp8.checkpoints.check import check_layout
from fp8.checkpoints.layouts import LAYOUTS, ORDERS
from fp8.checkpoints.weights import weights
from tests.fp8.checkpoints.test_engines import WRITTEN, decoder
from tests.shared import Net, parametrize, refuses

safetensors = pytest.importorskip("safetensors.torch")


def written(layout, **options):
    """The tensors of a small decoder."""
    experts = layout != "nvfp4_sm100"
    model = fp8.convert(decoder(experts), WRITTEN[layout])
    return dict(weights(model, layout=layout, **options))


@parametrize("layout", WRITTEN)
def test_what_is_written_passes(layout):
    """With values and without, as its layout, and for each engine that has it; no other layout has
    it. Shapes do not tell scales in whole tiles from those in rows."""
    tensors = written(layout)
    meta = {name: x.to("meta") for name, x in tensors.items()}
    row = LAYOUTS[layout]
    names = [layout]
    if row.place == "file":
        names += [source.engine for source in row.sources]
    for name in names:
        for each in (tensors, meta):
            found = check_layout(each, name)
            assert (found.layout, found.why) == (layout, "")
            assert found.weights > 3
    for other in LAYOUTS.keys() - {layout}:
        alike = (layout, other) == ("nvfp4_sm100", "nvfp4")
        assert alike or check_layout(tensors, other).why


DOWN = "layers.0.mlp.down_proj"


def meta(shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def block(shape, scale, dtype=torch.float32, name="weight_scale_inv"):
    """A layer of another model."""
    return {
        "layers.3.mlp.down_proj.weight": meta(shape, torch.float8_e4m3fn),
        f"layers.3.mlp.down_proj.{name}": meta(scale, dtype),
    }


def packed(exponents):
    return ORDERS["packed"].write(torch.tensor(exponents).exp2(), 256)


MISMATCHES = {
    # prime-rl 3036: the grid of a file for parameters of Blackwell.
    "raw for packed": (
        block((2624, 6144), (21, 48)),
        "block_sm100",
        "scale of layers.3.mlp.down_proj is 21 x 48, this engine wants 2624 x 12: "
        "it is as in layout 'block'",
    ),
    # vime 133: the pack of one engine for another one, which packs by itself.
    "packed for raw": (
        block((2624, 6144), (2624, 12), torch.int32),
        "vllm",
        "scale of layers.3.mlp.down_proj is 2624 x 12, this engine wants 21 x 48: "
        "it is as in layout 'block_sm100'",
    ),
    "packed twice": (
        block((2624, 6144), (2624, 3), torch.int32),
        "block_sm100",
        "scale of layers.3.mlp.down_proj is 2624 x 3, this engine wants 2624 x 12: "
        "it is packed twice",
    ),
    "transposed": (
        block((5504, 2048), (16, 43)),
        "block",
        "scale of layers.3.mlp.down_proj is 16 x 43, this engine wants 43 x 16",
    ),
    # Model-Optimizer 1807.
    "name": (
        block((256, 256), (2, 2), name="weight_scale"),
        "transformers",
        "layers.3.mlp.down_proj has its scale as weight_scale, this engine wants "
        "weight_scale_inv",
    ),
    "dtype of scales": (
        block((256, 256), (2, 2), torch.bfloat16),
        "block",
        "scale of layers.3.mlp.down_proj is bfloat16, this engine wants float32",
    ),
    "dtype of values": (
        block((256, 256), (2, 2)) | {"layers.3.mlp.down_proj.weight": meta((256, 256))},
        "block",
        "values of layers.3.mlp.down_proj are float32, this engine wants float8_e4m3fn",
    ),
    "no scale": (
        {"layers.3.mlp.down_proj.weight": meta((256, 256), torch.float8_e4m3fn)},
        "block",
        "layers.3.mlp.down_proj has no scale: weight_scale_inv is missing",
    ),
    "no weight": (
        block((256, 256), (2, 2)) | {"norm.weight": meta(4), "o.weight_scale": meta(1)},
        "block",
        "o.weight_scale is a scale without a weight",
    ),
    "no low precision": (
        {"o.weight": meta((4, 4))},
        "sglang",
        "no weight is in low precision",
    ),
    "a mask is no weight": (
        {"o.weight": meta((4, 4)), "mask": meta((4, 4), torch.uint8)},
        "sglang",
        "no weight is in low precision",
    ),
}


@parametrize("name", MISMATCHES)
def test_mismatches_of_shapes_names_and_dtypes(name):
    tensors, engine, why = MISMATCHES[name]
    assert check_layout(tensors, engine).why == why


def changed(tensors, name, x):
    return tensors | {name: x}


def test_apart_and_fused():
    files, memory = written("block"), written("block_sm90")
    why = check_layout(files, "block_sm90").why
    assert why.endswith(
        "v_proj are apart: this engine has them as layers.0.self_attn.qkv_proj.weight"
    )
    why = check_layout(memory, "block").why
    assert why.endswith(
        "w13_weight is of all experts: files have a weight for each expert"
    )


def test_strides():
    tensors = written("block_sm100")
    name = f"{DOWN}.weight_scale_inv"
    tensors[name] = tensors[name].clone(memory_format=torch.contiguous_format)
    assert (
        "has strides (1, 1), this engine wants (1, 640)"
        in check_layout(tensors, "block_sm100").why
    )
    tensors = written("block")
    name = f"{DOWN}.weight_scale_inv"
    tensors[name] = tensors[name].mT.contiguous().mT
    assert "this engine wants it contiguous" in check_layout(tensors, "block").why


@parametrize(
    "exponents, twice, why",
    [
        # SGLang 25733: the mantissa of a scale in the exponent of another one.
        ([[-9.0, 128.0], [-9.0, -9.0]], False, r"has NaN \(byte 255 of E8M0\)"),
        (
            [[-9.0, 116.0], [-9.0, -9.0]],
            False,
            r"has 2\*\*116: it was packed twice, or",
        ),
        ([[-9.0, -9.0], [-9.0, -9.0]], True, "has 2\\*\\*-127: it was packed twice"),
        ([[-9.0, -9.0, -8.0, -7.0]] * 2, True, "packed twice, or from scales"),
    ],
)
def test_values_of_a_wrong_pack(exponents, twice, why):
    inputs = 128 * len(exponents[0])
    state = {"a.weight": torch.zeros(256, inputs).to(torch.float8_e4m3fn)}
    state["a.weight_scale_inv"] = packed([[-9.0] * len(exponents[0])] * 2)
    assert not check_layout(state, "block_sm100").why
    pack = packed(exponents)
    if twice:  # as DeepGEMM packs float32: without a look at what it gets
        bytes = (pack[::128] >> 23).to(torch.uint8)
        pack = ORDERS["packed"].write(bytes.view(torch.float8_e8m0fnu), 256)
    found = check_layout(changed(state, "a.weight_scale_inv", pack), "block_sm100")
    assert re.search(why, found.why), found.why


def test_padding_of_a_pack():
    """Four blocks for a weight of two."""
    state = {"a.weight": torch.zeros(256, 256).to(torch.float8_e4m3fn)}
    state["a.weight_scale_inv"] = packed([[-9.0] * 4] * 2)
    assert "bytes other than 0 in its padding" in check_layout(state, "block_sm100").why


def test_other_values():
    """Scales that are not finite; units of layers that an engine fuses."""
    tensors = written("nvfp4")
    name = "layers.0.self_attn.k_proj.weight_global_scale"
    why = check_layout(changed(tensors, name, 2 * tensors[name]), "nvfp4").why
    assert why.startswith("q_proj, k_proj, v_proj of layers.0.self_attn have unlike")
    name = "layers.0.self_attn.o_proj.weight_global_scale"
    for bad, text in ((torch.nan, "NaN or Inf"), (-1.0, "negative")):
        scale = torch.full_like(tensors[name], bad)
        assert text in check_layout(changed(tensors, name, scale), "nvfp4").why
    tensors = written("mxfp8")
    name = f"{DOWN}.weight_scale"
    scale = torch.full_like(tensors[name], 255)
    assert "NaN" in check_layout(changed(tensors, name, scale), "mxfp8").why
    extra = changed(tensors, f"{DOWN}.weight_scale_2", torch.ones(1))
    assert (
        check_layout(extra, "mxfp8").why
        == f"{DOWN}.weight_scale_2 is not a part of this layout"
    )


def test_a_second_shuffle():
    """SGLang 28963: an engine orders its memory anew, which no shape tells."""
    tensors = written("block_sm90")
    name = f"{DOWN}.weight"
    shuffled = (
        tensors[name].view(torch.uint8)[torch.randperm(640)].view(torch.float8_e4m3fn)
    )
    again = changed(tensors, name, shuffled)
    assert not check_layout(again, "block_sm90").why
    for state, why in (
        (tensors, ""),
        (again, f"{name} has the same bytes in another order: it was shuffled"),
        (
            changed(tensors, name, torch.zeros_like(shuffled)),
            f"{name} has other values",
        ),
        (
            {k: x for k, x in tensors.items() if k != "norm.bias"},
            "norm.bias is missing",
        ),
    ):
        assert check_layout(state, "block_sm90", same_as=tensors).why == why


def said(capsys, *arguments):
    code = main(["layout", *map(str, arguments)])
    return code, "".join(capsys.readouterr())


@parametrize("shapes", [(), ("--shapes",)])
def test_command(shapes, tmp_path, capsys):
    """Of a folder, a file, a folder in shards, and a state_dict; 0, 1, or 2."""
    model = fp8.convert(Net(a=nn.Linear(256, 256), b=nn.Linear(256, 128)), "block")
    fp8.export(model, tmp_path)
    path = tmp_path / "model.safetensors"
    torch.save(dict(fp8.weights(model, layout="block_sm100")), tmp_path / "state.pt")
    for source in (tmp_path, path):
        code, text = said(capsys, "check", source, "--engine", "vllm", *shapes)
        assert (code, text) == (0, "layout 'block': 2 weights pass\n")
    check = ("check", tmp_path / "state.pt", *shapes, "--engine")
    assert said(capsys, *check, "block_sm100")[0] == 0
    code, text = said(capsys, *check, "vllm")
    assert code == 1
    assert "scale of a is 256 x 1, this engine wants 2 x 2" in text
    same = (*shapes, "--same-as", tmp_path)
    assert said(capsys, "check", tmp_path, "--engine", "vllm", *same)[0] == 0
    config = {"quantization_config": {"quant_method": "awq"}}
    (tmp_path / "fp8.json").write_text(json.dumps(config))
    code, text = said(capsys, "check", tmp_path, "--engine", "vllm", *shapes)
    assert code == 1
    assert "the files say quant_method 'awq'" in text
    for source, engine in ((tmp_path / "none", "vllm"), (path, "llamafile")):
        code, text = said(capsys, "check", source, "--engine", engine)
        assert code == 2
        assert text.startswith("fp8 layout: ")


def test_list(capsys):
    code, text = said(capsys, "list")
    assert code == 0
    for row in LAYOUTS.values():
        assert f"{row.name} ({row.place})" in text
        assert all(source.version in text for source in row.sources)


def test_engines_are_known():
    with refuses("engine.*vllm.*block_sm100"):
        check_layout({}, "llamafile")
