"""Stacks of experts, of small models of transformers: in files that its loaders and `fp8.load`
read, and in the memory of engines."""

import json
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import fp8
from fp8.checkpoints.check import check_layout
from fp8.checkpoints.layouts import LAYOUTS
from fp8.warnings import RoundingWarning
from tests.fp8.adapters.hub_models import quiet, transformers  # noqa: F401
from tests.fp8.checkpoints.reading import same
from tests.fp8.checkpoints.test_engines import FILES, WRITTEN, cast_of
from tests.launch import needs_gloo, run_ranks
from tests.shared import (
    Net,
    assert_close,
    assert_same,
    by_path,
    normal,
    pairs,
    parametrize,
    quietly,
    refuses,
    sampled,
    theirs,
    warns,
)

with quietly():
    safetensors = pytest.importorskip("safetensors.torch")

pytestmark = theirs

SIZES = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "initializer_range": 0.2,
}
EXPERTS = "model.layers.0.mlp.experts"
STACKS = ("gate_up_proj", "down_proj")
IDS = torch.arange(24).reshape(2, 12) % 64


def make(kind, **options):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SIZES | options)
    return transformers.AutoModelForCausalLM.from_config(config)


#: Whose files have other names for experts, and for the router.
mixtral = partial(make, "mixtral", intermediate_size=256, num_local_experts=3)
qwen = partial(make, "qwen3_moe", moe_intermediate_size=128, num_experts=3, head_dim=64)
#: Whose files have transposed stacks.
gpt_oss = partial(make, "gpt_oss", num_local_experts=4, head_dim=64)


def converted(model, recipe):
    """In the layers between the embedding and the head."""
    return fp8.convert(model, fp8.Policy.hidden(recipe), backend="simulate")


def stacks_of(model):
    experts = model.get_submodule(EXPERTS)
    return {name: getattr(experts, name).detach() * 1 for name in STACKS}


def cast_stacks(model):
    """What the recipe of a model makes of its stacks: each expert is a matrix."""
    experts = model.get_submodule(EXPERTS)
    recipe = experts.fp8_recipe
    found = {}
    for name, stack in stacks_of(model).items():
        each = stack.mT if experts.is_transposed else stack
        layers = Net(layers=nn.ModuleList(nn.Linear(1, 1) for _ in each))
        for layer, weight in zip(layers.layers, each, strict=True):
            layer.weight.data = weight.contiguous()
        fp8.convert(layers, recipe, backend="simulate")
        done = [cast_of(layers, f"layers.{i}") for i in range(len(each))]
        done = torch.stack(done)
        found[name] = done.mT if experts.is_transposed else done
    return found


@parametrize("frozen", [True, False])
@parametrize("layout", FILES)
@parametrize("model", [mixtral, qwen])
def test_files_have_each_expert(model, layout, frozen, tmp_path):
    """Under the names of plain files, with the values of the recipe."""
    model().save_pretrained(tmp_path / "plain")
    plain = safetensors.load_file(tmp_path / "plain" / "model.safetensors")
    recipe = "tensor" if layout == "tensor" else WRITTEN[layout]
    trained = converted(model(), recipe)
    report = by_path(fp8.export(trained, tmp_path, layout=layout))
    assert report[EXPERTS].done == "FP8"
    stored = safetensors.load_file(tmp_path / "model.safetensors")
    values = LAYOUTS[layout].values
    for name in plain:
        path, _, last = name.rpartition(".")
        assert name in stored or f"{path}.{values.format(last)}" in stored
    assert stored.keys() == fp8.weights(trained, layout=layout).manifest.keys()
    config = json.loads((tmp_path / "config.json").read_text())
    found = check_layout(stored, layout, config=config["quantization_config"])
    assert (found.why, found.weights) == ("", 4 + 3 * 3)
    loaded = fp8.load(model(), tmp_path, frozen=frozen)
    # NVFP4's quotient of scales is rounded once more.
    rtol = 2.0**-22 if layout == "nvfp4" else 0
    got, want = stacks_of(loaded), cast_stacks(trained)
    for name in STACKS:
        assert_close(got[name], want[name], rtol=rtol, atol=0)
        stack = getattr(loaded.get_submodule(EXPERTS), name)
        assert isinstance(stack, fp8.ScaledTensor) is frozen
    assert loaded(IDS).logits.isfinite().all()


@parametrize(
    "recipe, layout",
    [("block", None), ("row", None), ("tensor", None), ("mxfp4", None)],
)
@parametrize("model", [mixtral, qwen])
def test_transformers_reads_each_expert(model, recipe, layout, tmp_path):
    """To the bit, in bfloat16. Version 5.24 reads neither the scales of mxfp8 nor the global scale
    of nvfp4 for experts."""
    trained = converted(model(), recipe)
    fp8.export(trained, tmp_path, layout=layout)
    options = {"dtype": torch.bfloat16}
    if recipe == "block":
        how = transformers.FineGrainedFP8Config(dequantize=True)
        options["quantization_config"] = how
    served = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, **options)
    got, want = stacks_of(served), cast_stacks(trained)
    for name in STACKS:
        assert_same(got[name], want[name].bfloat16())


#: Of transformers, by the names of their configurations.
FAMILIES = (
    "afmoe deepseek_v2 deepseek_v3 dots1 ernie4_5_moe exaone_moe flex_olmo glm4_moe glm4_moe_lite "
    "hunyuan_v1_moe jamba minimax minimax_m2 mixtral nemotron_h olmoe phimoe qwen2_moe qwen3_moe "
    "qwen3_next solar_open"
).split()
FEW = {
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "n_shared_experts": 1,
    "first_k_dense_replace": 0,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "head_dim": 32,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_group": 1,
    "topk_group": 1,
    "moe_k": 2,
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    "moe_num_experts": 4,
}


@sampled(4)
@parametrize("kind", FAMILIES)
def test_families(kind, tmp_path):
    """All layers are stored that have a recipe; transformers and `fp8.load` read the same stacks,
    which are those of the recipe."""
    trained = fp8.convert(make(kind, **FEW), "row", backend="simulate")
    stacks = {
        f"{path}.{name}": path
        for path, module in trained.named_modules()
        for name, p in module.named_parameters(recurse=False)
        if p.dim() == 3 and "experts" in path
    }
    assert stacks
    report = by_path(fp8.export(trained, tmp_path))
    assert {report[path].done for path in stacks.values()} == {"FP8"}
    served = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32
    )
    loaded = fp8.load(make(kind, **FEW), tmp_path, frozen=False)
    for name in stacks:
        weight = trained.get_parameter(name)
        want = fp8.quantize(weight, "e4m3", scale=row_scales(weight))
        assert_same(loaded.get_parameter(name).detach(), want)
        assert_same(served.get_parameter(name).detach(), want)


def row_scales(weight):
    """The smallest powers of two by which no row of e4m3 overflows."""
    amax = weight.detach().abs().amax(-1, keepdim=True)
    return (amax / 448).log2().ceil().exp2()


def test_gpt_oss(tmp_path):
    """Transformers' own loader reads its blocks; logits are those of the trainer, with inputs in
    high precision in both. `fp8.load` reads them, and another export has the same bytes."""
    weights = fp8.Recipe(name="weights", weight=fp8.RECIPES["mxfp4"].weight)
    policy = fp8.Policy(None, rules=[("*.experts", None, weights)])
    trained = fp8.convert(gpt_oss(), policy, backend="simulate")
    report = fp8.export(trained, tmp_path, layout="mxfp4_blocks")
    assert [(row.path, row.done) for row in report] == [(EXPERTS, "FP8")]
    stored = safetensors.load_file(tmp_path / "model.safetensors")
    shapes = {
        name.removeprefix(f"{EXPERTS}."): tuple(x.shape)
        for name, x in stored.items()
        if EXPERTS in name
    }
    assert shapes == {
        "gate_up_proj_blocks": (4, 256, 4, 16),
        "gate_up_proj_scales": (4, 256, 4),
        "gate_up_proj_bias": (4, 256),
        "down_proj_blocks": (4, 128, 4, 16),
        "down_proj_scales": (4, 128, 4),
        "down_proj_bias": (4, 128),
    }
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    for engine in ("mxfp4_blocks", "vllm", "transformers"):
        found = check_layout(stored, engine, config=config)
        assert (found.layout, found.why, found.weights) == ("mxfp4_blocks", "", 2)
    served = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32
    )
    loaded = fp8.load(gpt_oss(), tmp_path)
    want = cast_stacks(trained)
    for model in (served, loaded, fp8.load(gpt_oss(), tmp_path, frozen=False)):
        assert_same(stacks_of(model), want)
        with torch.no_grad():
            logits = [each(IDS).logits for each in (model, trained)]
        assert_close(*logits, rtol=1e-5, atol=1e-5)
    assert loaded.get_submodule(EXPERTS).down_proj.stored.dtype == torch.float8_e4m3fn
    fp8.export(fp8.convert(loaded, policy), tmp_path / "2", layout="mxfp4_blocks")
    again = safetensors.load_file(tmp_path / "2" / "model.safetensors")
    assert_same(again, stored)


@parametrize("layout", ["block_sm90", "block_sm100"])
@parametrize("model", [mixtral, qwen])
def test_memory_has_all_experts(model, layout):
    """The parts of each expert one after the other, as they are in files."""
    trained = converted(model(), "block")
    sent = dict(fp8.weights(trained, layout=layout))
    assert not check_layout(sent, layout).why
    files = dict(fp8.weights(trained, layout="block"))
    names = [name for name in files if ".experts." in name and "scale" not in name]
    owner = names[0].partition(".experts.")[0] + ".experts"
    second = [name for name in names if "down" in name or "w2" in name]
    for stem, parts in (("w2", second), ("w13", sorted({*names} - {*second}))):
        each = torch.cat([files[name].float() for name in parts])
        stack = sent[f"{owner}.{stem}_weight"]
        assert_same(stack.float(), each.view(stack.shape))


def test_plain_files_load(tmp_path):
    """With a weight for each expert, and the router under another name."""
    for model in (mixtral, qwen, gpt_oss):
        want = model()
        want.save_pretrained(tmp_path)
        assert_same(
            fp8.load(make_other(model), tmp_path).state_dict(), want.state_dict()
        )


def make_other(model):
    other = model()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    return other


def test_a_file_with_experts_missing(tmp_path):
    fp8.export(converted(qwen(), "row"), tmp_path)
    stored = safetensors.load_file(tmp_path / "model.safetensors")
    name = f"{EXPERTS}.1.up_proj.weight"
    scale = f"{name}_scale"
    without = {key: x for key, x in stored.items() if key != name}
    with refuses(rf"missing: {EXPERTS}.gate_up_proj"):
        fp8.load(qwen(), without)
    without = {key: x for key, x in stored.items() if key != scale}
    with refuses(rf"{name} is stored in torch.float8_e4m3fn without a scale"):
        fp8.load(qwen(), without)


@parametrize(
    "model, recipe, layout, why",
    [
        (
            gpt_oss,
            "mxfp4",
            None,
            "the files of this model have stacks: take layout 'mxfp4_blocks'",
        ),
        (
            gpt_oss,
            "row",
            None,
            "layout 'row' has a weight for each expert, .* have stacks$",
        ),
        (
            qwen,
            "static",
            None,
            "of products, not of experts: take recipe 'tensor' or 'row'",
        ),
    ],
)
def test_left_alone(model, recipe, layout, why, tmp_path):
    """In high precision, and named in the configuration."""
    trained = converted(model(), recipe)
    trained(IDS, labels=IDS).loss.backward()
    stream = fp8.weights(trained, layout=layout)
    row = by_path(stream.report)[EXPERTS]
    assert row.left_alone
    with refuses(why):
        raise ValueError(row.why)
    ignored = stream.config["ignore"]
    assert f"{EXPERTS}.2.up_proj" in ignored or f"{EXPERTS}.gate_up_proj" in ignored
    assert any(name.endswith((".gate", ".router")) for name in ignored)


def test_layers_under_other_names_in_files(tmp_path):
    """A router that is a linear layer: its scale is beside its weight. The names of the stream are
    those of the file, and so are the layers that are not cast."""
    model = make("phimoe", num_local_experts=4)
    fp8.export(fp8.convert(model, "row", backend="simulate"), tmp_path)
    stored = safetensors.load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.block_sparse_moe.gate.weight"
    assert {name, f"{name}_scale"} <= stored.keys()
    assert fp8.weights(model).manifest.keys() == stored.keys()
    loaded = fp8.load(make("phimoe", num_local_experts=4), tmp_path)
    assert_same(loaded.state_dict()["lm_head.weight"] * 1, cast_of(model, "lm_head"))
    kept = fp8.weights(converted(mixtral(), "row")).config["ignore"]
    assert {"model.layers.0.mlp.gate", "model.layers.0.block_sparse_moe.gate"} <= {
        *kept
    }


def test_a_model_that_transformers_cannot_save(tmp_path):
    """As it does not undo how it has read the experts."""
    fp8.export(converted(mixtral(), "row"), tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    with refuses("Undefined Operation"):
        model.save_pretrained(tmp_path / "again")
    kept = fp8.Policy("row", rules=[("*.experts", None, None)])
    model.lm_head = nn.Linear(128, 64, bias=False)
    stream = fp8.weights(fp8.convert(model, kept))
    assert [row.path for row in stream.report] == ["lm_head"]
    assert f"{EXPERTS}.gate_up_proj" in stream.manifest


def test_layers_that_files_have_as_one(tmp_path):
    """Stay in high precision, as a file would not have their scales."""
    model = make("hrm_text", head_dim=64)
    model.save_pretrained(tmp_path / "plain")
    plain = safetensors.load_file(tmp_path / "plain" / "model.safetensors")
    report = by_path(
        fp8.export(fp8.convert(model, "row", backend="simulate"), tmp_path)
    )
    path = "model.L_module.layers.0"
    why = report[f"{path}.self_attn.q_proj"].why
    assert why == "the files of this model have its weight as a part of another one"
    assert report[f"{path}.self_attn.o_proj"].done == "FP8"
    stored = safetensors.load_file(tmp_path / "model.safetensors")
    name = f"{path}.attn.gqkv_proj.weight"
    assert_same(stored[name], plain[name])
    assert f"{path}.attn.o_proj.weight_scale" in stored


def test_stacks_of_a_model_of_ones_own(tmp_path):
    """That say whether they are transposed; others stay in high precision."""

    def experts(**said):
        stacks = {
            "up": nn.Parameter(normal(3, 64, 96)),
            "down": nn.Parameter(normal(3, 96, 64)),
        }
        return Net(lambda m, x: x @ m.up @ m.down, **stacks, **said)

    model = Net(said=experts(is_transposed=True), silent=experts())
    report = by_path(
        fp8.export(fp8.convert(model, "mxfp4"), tmp_path, layout="mxfp4_blocks")
    )
    assert report["said"].done == "FP8"
    assert "does not say whether its stacks are transposed" in report["silent"].why
    loaded = fp8.load(Net(said=experts(is_transposed=True), silent=experts()), tmp_path)
    assert loaded.said.up.memory.tile == (32, 1)
    assert_same(loaded.silent.up, model.silent.up)


def test_a_lost_update_of_a_stack_is_named(tmp_path):
    fp8.export(converted(qwen(), "row"), tmp_path)
    for update, lost in ((2.0**-12, True), (0.5, False)):
        model = fp8.load(qwen(), tmp_path)
        stack = model.get_submodule(EXPERTS).gate_up_proj
        with torch.no_grad():
            stack.add_(update * normal(*stack.shape) * stack.dequantize())
        model = converted(model, "row")
        if lost:
            with warns(
                rf"of what was written to '{EXPERTS}.gate_up_proj'", RoundingWarning
            ):
                dict(fp8.weights(model))
        else:
            dict(fp8.weights(model))


def check_sharded(rank, store):
    for model, recipe, layout in (
        (qwen, "tensor", None),
        (gpt_oss, "mxfp4", "mxfp4_blocks"),
    ):
        whole, sharded = (converted(model(), recipe) for _ in range(2))
        for part in (sharded.get_submodule(EXPERTS), sharded):
            fully_shard(part)
        ours, theirs = (
            dict(fp8.weights(each, layout=layout)) for each in (whole, sharded)
        )
        assert ours.keys() == theirs.keys()
        assert all(same(a, b) for a, b in pairs(ours.values(), theirs.values()))


@needs_gloo
def test_sharded_stacks_are_gathered(tmp_path):
    run_ranks(check_sharded, 2, tmp_path / "store", warnings="default")
