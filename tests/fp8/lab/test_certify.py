"""Certificates: a trainer against an engine that has loaded its weights."""

import json
from copy import deepcopy

import pytest
import torch
from torch import nn

import fp8
from fp8.__main__ import main
from fp8.lab.parity.certify import NOT_COVERED, certify
from fp8.lab.parity.engines import ENGINES
from fp8.lab.parity.norms import norms_of_engine
from tests.fp8.lab.test_parity import network, prompts
from tests.shared import assert_same, parametrize, proves, refuses, sampled

pytest.importorskip("transformers")

FAMILIES = ("llama", "qwen", "gemma", "mixture", "hybrid")
NAME = "fp8.lab.parity.families:{}"


def family(name):
    from fp8.lab.parity import families

    return getattr(families, name)()


@proves("the field", "certificate that trainer and engine are equal to the bit")
@sampled(3)
@parametrize("name", FAMILIES)
@parametrize("engine", ["vllm_row", "vllm_block", "sglang_block"])
def test_five_families(name, engine):
    """With norms in the engine's order; the weights went through its layout."""
    model, ids = family(name)
    norms_of_engine(model, engine)
    found = certify(model, ids, engine=engine)
    assert found.ok
    assert (found.equal, found.kl, found.ratio, found.begins) == (1.0, 0.0, 1.0, "")
    assert found.ess == pytest.approx(1, abs=1e-12)
    assert found.tokens == 128
    assert len(found.norms) >= 5
    assert not found.gains
    assert len(found.cast) >= 8
    assert "lm_head" in found.kept


def test_the_order_of_norms_is_found_and_mended():
    """HF's Llama under SGLang, and under vLLM 0.20 (issue 42325); the recipe is the engine's."""
    for engine in ("sglang_row", "vllm_0_20_row"):
        model, ids = family("llama")
        state = deepcopy(model.state_dict())
        found = certify(model, ids, engine=engine)
        assert not found.ok
        assert found.begins == "model.layers.0.input_layernorm"
        assert 0.005 < found.kl < 0.05
        assert found.ratio > 1.2
        assert found.weights == ""
        assert certify(norms_of_engine(model, engine), ids, engine=engine).ok
        assert_same(model.state_dict(), state)


def test_scales_that_are_powers_of_two_are_found():
    model, ids = family("llama")
    found = certify(model, ids, train="row")
    assert found.begins == "model.layers.0.self_attn.q_proj"
    assert found.kl > 1e-3
    assert certify(model, ids, train="row_exact").ok
    assert certify(model, ids, engine="vllm_static", train="static").weights == ""
    with refuses(
        "reads a static scale of the inputs of .*q_proj, and the trainer writes"
    ):
        certify(model, ids, engine="vllm_static", train="tensor")


def test_a_layer_that_the_file_does_not_have_in_low_precision():
    """Its trainer casts experts, or a head, that its engine does not."""
    model, ids = family("llama")
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    tied = certify(model, ids, train="row_exact")
    assert "lm_head" in tied.cast
    assert tied.ok
    model.lm_head.weight = model.model.embed_tokens.weight
    found = certify(model, ids, train="row_exact")
    assert found.begins == "lm_head"
    assert found.kept == ["lm_head"]


def test_sums_and_a_cache():
    model, ids = family("llama")
    hopper = fp8.Policy(
        fp8.Recipe.from_dict(
            fp8.RECIPES["row_exact"].to_dict() | {"accumulate": "hopper"}
        ),
        rules=[("lm_head", None, None)],
    )
    found = certify(model, ids[:1], train=hopper)
    assert found.begins == "model.layers.0.self_attn.q_proj"
    assert 1e-4 < found.kl < 0.02
    assert certify(model, ids[:1], sums="hopper").ok
    cached = certify(model, ids, cache="token")
    assert cached.begins == "model.layers.0.self_attn.o_proj"
    assert "cache in FP8 by token" in str(cached)


def test_a_model_of_one_s_own():
    """Without transformers' classes, in float32, which engines do not serve; the model does not
    change."""
    model, ids = network(), prompts()
    before = deepcopy(model.state_dict())
    found = certify(model, ids, train="row_exact", dtype=None)
    assert found.ok
    assert found.served == "float32"
    found = certify(model, ids, train="row_exact")
    assert (found.dtype, found.served) == ("float32", "bfloat16")
    assert found.begins == "tokens"
    assert found.weights == ""
    assert_same(model.state_dict(), before)
    assert {row.done for row in fp8.report(model)} == {"left alone"}
    model.add_module("norm", nn.RMSNorm(64))  # of an eps that is no attribute
    assert certify(model, ids, train="row_exact").gains == ["norm"]


def test_a_converted_model_is_the_trainer_as_it_is():
    """With the scales that it has, which are in the file."""
    model, ids = family("llama")
    fp8.convert(model, "static")
    fp8.calibrate(model, ids[0], lambda y: y.logits.float().logsumexp(-1).mean())
    found = certify(model, ids, engine="vllm_static")
    assert found.train == "as it is"
    assert found.weights == ""
    assert found.ok
    row = fp8.convert(family("llama")[0], "row_exact")
    assert certify(row, ids).ok
    assert row.lm_head.fp8_recipe == fp8.RECIPES["row_exact"]


def test_nan_is_equal_to_nothing():
    model, ids = family("llama")
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nan
    found = certify(model, ids)
    assert not found.ok
    assert json.dumps(found.to_dict(), allow_nan=False)


@parametrize(
    "changes, error, message",
    [
        ({"engine": "vllm_rwo"}, ValueError, "did you mean 'vllm_row'"),
        ({"engine": "sglang_block", "train": "row"}, ValueError, "scales by block"),
        ({"sums": "exct"}, ValueError, "sums"),
        ({"cache": "token"}, ValueError, "for models of transformers, not a Net"),
        ({"train": "nvfp4"}, ValueError, "writes them by nv"),
    ],
)
def test_bad_arguments(changes, error, message):
    with refuses(message, error):
        certify(network(), prompts(), **changes)
    with refuses("certify", TypeError):
        certify(3, prompts())


def test_the_command_and_its_page(tmp_path, capsys):
    page = tmp_path / "certificate.html"
    command = ["parity", "certify", NAME.format("gemma"), "--page", str(page)]
    assert main([*command, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["ok"]
    assert values["engine"] == "vllm_row"
    assert values["source"] == ENGINES["vllm_row"].source
    assert {"fp8", "torch", "transformers", "python"} <= values["versions"].keys()
    text = page.read_text(encoding="utf-8")
    assert "Pass: Gemma2ForCausalLM, trainer row_exact, engine vllm_row" in text
    assert all(line in text for line in NOT_COVERED[1:])
    command[2] = NAME.format("llama")
    assert main([*command, "--engine", "sglang_row"]) == 1
    assert "differs first in" in capsys.readouterr().out
    assert "They differ first in model.layers.0.input_layernorm" in page.read_text()
