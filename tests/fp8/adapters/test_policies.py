"""Policies in the terms of torchao, TransformerEngine and Megatron, read by their own readers."""

import ast
import dataclasses
import enum
import sys
import types

import pytest
import torch
from torch import nn

import fp8
from fp8 import Policy
from fp8.adapters.policies import (
    as_code,
    for_megatron,
    for_torchao,
    for_transformer_engine,
    open_contexts,
)
from tests.fp8.adapters.te_library import recipe_in_force
from tests.fp8.layers.test_policies import net
from tests.shared import normal, parametrize, refuses
from tests.wheels import unpacked

X = normal(32, 16, seed=1)


# torchao


def test_what_torchao_does_not_have():
    pytest.importorskip("torchao.float8")
    model = nn.Sequential(nn.Conv1d(16, 16, 1), nn.Linear(16, 16))
    parts, notes = for_torchao(
        Policy("row", switch=[(0.9, "bf16")]), model, emulate=True
    )
    assert [names for _, names in parts] == [{"1"}]
    assert "at 0.9 of the steps" in notes[0]
    assert "'bf16'" in notes[0]
    assert "linear layers only: '0'" in notes[1]
    with refuses(r"layer '1': torchao has no .* 'nvfp4'"):
        for_torchao(Policy("row", rules=[("1", None, "nvfp4")]), model)


# TransformerEngine


def enabled(policy):
    """Module -> TransformerEngine's recipe in force during its forward."""
    model, forward = net(), nn.Linear.forward
    names = {id(module): name for name, module in model.named_modules()}
    seen = {}

    def see(self, x):
        recipe = recipe_in_force()
        seen[names[id(self)]] = None if recipe is None else type(recipe).__name__
        return forward(self, x)

    open_contexts(model, for_transformer_engine(policy, net())[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Linear, "forward", see)
        model(X)
    assert recipe_in_force() is None
    return seen


def test_transformer_engine_runs_each_layer_in_its_context(te):
    policy = Policy(
        "mxfp8", rules=[("*.down", None, "tensor")], first=1, keep=["readout"]
    )
    assert enabled(policy) == {
        "patch": "MXFP8BlockScaling",
        **{f"blocks.0.{part}": None for part in ("up", "down")},
        **{f"blocks.{i}.up": "MXFP8BlockScaling" for i in (1, 2, 3)},
        **{f"blocks.{i}.down": "Float8CurrentScaling" for i in (1, 2, 3)},
        "head": None,
    }
    only = Policy(None, rules=[("head", None, "block"), ("patch", None, "bf16")])
    assert {name for name, recipe in enabled(only).items() if recipe} == {"head"}
    model = net()
    open_contexts(model, for_transformer_engine(policy, net())[0])
    for module in (model.head, model):
        with pytest.raises(RuntimeError):
            module(torch.randn(2, 3))
    assert recipe_in_force() is None
    with refuses("layer 'head': TransformerEngine has no recipe"):
        for_transformer_engine(
            Policy("mxfp8", rules=[("head", "grad_weight", None)]), net()
        )
    _, notes = for_transformer_engine(Policy("mxfp8", switch=[(0.9, "bf16")]), net())
    assert "TransformerEngine does not switch" in notes[0]


# Megatron


VERSION = "0.16.1"
NAMES = [
    f"decoder.layers.{i}.{part}"
    for i in range(3)
    for part in (
        *("self_attention.linear_qkv", "self_attention.linear_proj"),
        *("mlp.linear_fc1", "mlp.linear_fc2"),
    )
]


@pytest.fixture(scope="module")
def megatron(tmp_path_factory):
    """Megatron's own readers of the file, from its published wheel: RecipeConfig, as it is, and
    TEQuantizationParams, the classes of a module that imports TransformerEngine."""
    pytest.importorskip("yaml", reason="Megatron reads YAML with it")
    core = unpacked(f"megatron_core=={VERSION}", tmp_path_factory.mktemp("megatron"))
    core = core / "megatron" / "core"
    modules = {
        name: types.ModuleType(name)
        for name in "megatron megatron.core megatron.core.utils quant_config".split()
    }
    modules["megatron.core.utils"].log_single_rank = lambda *args, **kwargs: None
    module = modules["quant_config"]  # dataclasses look their module up
    with pytest.MonkeyPatch.context() as patch:
        for name, fake in modules.items():
            patch.setitem(sys.modules, name, fake)
        exec((core / "quantization/quant_config.py").read_text(), vars(module))
        _classes(core / "enums.py", ["Fp8Recipe", "Fp4Recipe"], module)
        names = [
            "_TE_CONFIG_TYPE_KEY",
            "TransformerEngineConfigType",
            "TEQuantizationRecipe",
        ]
        names.append("TEQuantizationParams")
        _classes(core / "extensions/transformer_engine.py", names, module)
    return module


def _classes(path, names, module):
    """Executes the statements of a file that define ``names`` in ``module``."""
    vars(module).update(enum=enum, dataclasses=dataclasses)
    exec("from typing import *", vars(module))
    for node in ast.parse(path.read_text()).body:
        targets = [getattr(t, "id", "") for t in getattr(node, "targets", [])]
        if getattr(node, "name", "") in names or set(targets) & set(names):
            exec(compile(ast.Module([node], []), str(path), "exec"), vars(module))


def read(megatron, text, folder):
    """Module of NAMES -> what Megatron overrides for training, or None."""
    path = folder / "policy.yaml"
    path.write_text(text)
    config = megatron.RecipeConfig.from_yaml_file(str(path))
    found = {}
    for number, name in enumerate(NAMES):
        matched = config.match(megatron.MatchContext(name, number))
        parse = megatron.TEQuantizationParams.parse_from_config
        found[name] = None if matched is None else parse(matched).training_recipe
    return found


def test_megatron_reads_the_rules_as_they_were_meant(megatron, tmp_path):
    """For each module: what our rules say for its name, later ones first."""
    policy = Policy(
        "mxfp8",
        rules=[
            ("*.linear_*", None, "nvfp4_nvidia"),
            ("*.layers.1.*", None, "tensor"),
            ("*.linear_fc1", None, None),
        ],
        keep=["residual"],
    )
    files = for_megatron(policy)
    assert files.flags == ["--fp8-format=e4m3", "--fp8-recipe=mxfp8"]
    for name, found in read(megatron, files.yaml, tmp_path).items():
        assert found.override_quantized_autocast
        assert not found.override_nonquantized_autocast
        fields = (
            found.fp8_quantization_recipe,
            found.fp4_quantization_recipe,
            found.fp8_format,
        )
        if not name.endswith("qkv"):
            assert fields[:2] == (None, None), name
        elif ".layers.1." in name:
            assert fields == ("tensorwise", None, "hybrid")
        else:
            assert fields[:2] == (None, "nvfp4")


def test_megatron_enables_rules_of_a_model_in_high_precision(megatron, tmp_path):
    files = for_megatron(
        Policy(None, rules=[('*"x', None, "bf16"), ("*.mlp.*", None, "block")])
    )
    assert files.flags == []
    for name, found in read(megatron, files.yaml, tmp_path).items():
        assert (found is not None) == (".mlp." in name)
        if found is not None:
            assert found.override_nonquantized_autocast is True
            assert (found.fp8_quantization_recipe, found.fp8_format) == (
                "blockwise",
                "e4m3",
            )


def test_the_flags_of_megatron():
    assert for_megatron(Policy("nvfp4_nvidia", first=2)).flags == [
        *("--fp4-format=e2m1", "--fp4-recipe=nvfp4"),
        *("--first-last-layers-bf16", "--num-layers-at-start-in-bf16=2"),
        "--num-layers-at-end-in-bf16=0",
    ]
    delayed = for_megatron(Policy("delayed"))
    assert delayed.yaml == ""
    assert delayed.flags[:2] == ["--fp8-format=hybrid", "--fp8-recipe=delayed"]
    assert "--fp8-amax-history-len=16" in delayed.flags
    assert any(
        "not powers of two" in note for note in for_megatron(Policy("tensor")).notes
    )
    assert any("output layer" in note for note in delayed.notes)


@parametrize(
    "policy, message",
    [
        (Policy("row"), "the policy: Megatron has no recipe 'row'; it has 'tensor'"),
        (
            Policy("mxfp8", rules=[("*", None, "unit")]),
            r"rule 1 \('\*'\): .* no recipe 'unit'",
        ),
        (Policy("mxfp8", rules=[("*", "forward", None)]), "no recipe for single casts"),
        (
            Policy("mxfp8", rules=[("*", None, "delayed")]),
            "'delayed' for the whole model only",
        ),
        (Policy("delayed", first=1), "does not combine these with 'delayed'"),
        (Policy(None, first=1), "only with a recipe for the others"),
        (Policy("mxfp8", last=0.15), r"last=0.15: .*for_megatron\(policy, blocks=n\)"),
    ],
)
def test_what_megatron_does_not_have(policy, message):
    with refuses(message):
        for_megatron(policy)
    assert as_code(policy)["megatron"].startswith("# not possible: ")


def test_megatron_takes_the_number_of_blocks_of_a_share():
    files = for_megatron(Policy("mxfp8", first=1, last=0.15), blocks=32)
    assert "--num-layers-at-start-in-bf16=1" in files.flags
    assert "--num-layers-at-end-in-bf16=5" in files.flags


# Code


@parametrize(
    "policy",
    [
        Policy(),
        Policy(
            "mxfp8",
            rules=[("*.up", "grad", None)],
            first=1,
            keep=["readout"],
            name='a "b"',
        ),
        Policy(
            fp8.Recipe(name="own", input=fp8.Cast(format="e4m3")),
            switch=[(0.9, "bf16")],
        ),
        Policy(
            "row", last=0.3, switch=[(0.5, Policy(None, rules=[("*", None, "row")]))]
        ),
    ],
)
def test_the_code_makes_the_policy(policy):
    code = as_code(policy)
    assert code.keys() == {"fp8", "torchao", "transformer_engine", "megatron"}
    model = net()
    space = {"model": model, "step": 0, "steps": 10}
    exec(code["fp8"], space)
    assert space["policy"] == policy
    wanted = fp8.convert(net(), policy)
    assert fp8.report(space["model"]) == fp8.report(wanted)


def test_the_code_for_torchao_and_transformer_engine_runs(te):
    layers = pytest.importorskip("torchao.float8.float8_linear")
    space = {"model": net(), "te_model": net()}
    code = as_code(Policy("tensor", rules=[("*.up", None, "mxfp8")], keep=["readout"]))
    exec(code["transformer_engine"], space)
    assert space["contexts"].keys() == {
        "",
        "head",
        *(f"blocks.{i}.up" for i in range(4)),
    }
    policy = Policy("tensor", rules=[("*.up", None, "row")], keep=["readout"])
    exec(as_code(policy)["torchao"], space)
    kinds = {
        n
        for n, m in space["model"].named_modules()
        if isinstance(m, layers.Float8Linear)
    }
    assert kinds == {
        n for n, m in net().named_modules() if isinstance(m, nn.Linear)
    } - {"head"}
