"""Tensor parallelism of engines, against the formulas of their sources in float64."""

import dataclasses
import json
from copy import deepcopy
from functools import reduce

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fp8
from fp8.__main__ import main
from fp8.lab.parity.certify import certify
from fp8.lab.parity.devices import REDUCTIONS, Devices
from fp8.lab.parity.engines import ENGINES
from fp8.lab.parity.sides import set_sums
from tests.fp8.lab.test_certify import NAME, family
from tests.fp8.lab.test_engines import vllm_group, vllm_token
from tests.fp8.lab.test_parity import network, prompts
from tests.launch import needs_gloo, run_ranks
from tests.shared import assert_same, parametrize, refuses, seeded

IN, OUT = 512, 256
TWO = ["*.o_proj", "*.down_proj"]


def partial_of_row(x, w, columns):
    """The scale of a channel is that of the whole weight, the scale of a token that of a slice."""
    a, scale = vllm_token(x[:, columns])
    b, of_channel = vllm_token(w)
    products = a.double() @ b[:, columns].double().mT
    return of_channel.mT * (scale * products.float())


def partial_of_block(x, w, columns):
    blocks = w.unflatten(0, (-1, 128)).unflatten(-1, (-1, 128))
    largest = blocks.abs().amax((1, 3), keepdim=True) / 448
    b = (blocks / largest).to(torch.float8_e4m3fn).double().reshape(w.shape)
    largest = largest.expand(-1, 128, -1, -1).reshape(OUT, -1)
    total = torch.zeros(len(x), OUT)
    for start in range(columns.start, columns.stop, 128):
        block = slice(start, start + 128)
        a, scale = vllm_group(x[:, block])
        products = (a.double() @ b[:, block].mT).float()
        factor = scale * largest[:, start // 128]
        total = (total.double() + products.double() * factor.double()).float()
    return total


def partial_of_plain(x, w, columns):
    return (x[:, columns].double() @ w[:, columns].double().mT).float()


PARTIALS = {
    "vllm_row": partial_of_row,
    "vllm_block": partial_of_block,
    "none": partial_of_plain,
}


def once(parts):
    return sum(part.double() for part in parts).float().bfloat16()


def ring(parts):
    return reduce(lambda a, b: (a.double() + b.double()).float().bfloat16(), parts)


SUMS = {"once": once, "ring": ring}


def plain(bias):
    """A layer of integers, whose sums are exact in any order, and its inputs."""
    layer = nn.Linear(IN, OUT, bias, dtype=torch.bfloat16)
    x = torch.empty(24, IN, dtype=torch.bfloat16)
    generator = seeded(0)
    for each in (x, *layer.parameters()):
        each.data.normal_(std=16, generator=generator).round_()
    return layer, x


@parametrize("reduction", SUMS)
@parametrize("bias", [False, True])
@parametrize("name, count", [("vllm_row", 4), ("vllm_block", 4), ("none", 2)])
def test_a_layer_is_the_sum_of_rounded_partial_outputs(name, count, bias, reduction):
    """The first device adds the bias: to its rounded partial output, or before in torch's layer."""
    layer, x = plain(bias)
    if name != "none":
        fp8.convert(layer, ENGINES[name].recipe)
        set_sums(layer, "exact")
    partial, size, parts = PARTIALS[name], IN // count, []
    for start in range(0, IN, size):
        columns = slice(start, start + size)
        part = partial(x.float(), layer.weight.detach().float(), columns)
        if name != "none":
            part = part.bfloat16().float()
        if bias and not start:
            part = part + layer.bias.detach().float()
        parts.append(part.bfloat16())
    with torch.no_grad():
        before = layer(x)
        Devices(count, ("",), reduction).share(layer)
        found = layer(x)
    assert_same(found, SUMS[reduction](parts))
    assert not torch.equal(found, before)
    assert ("bias" in dict(layer.named_parameters())) == bias
    assert set(SUMS) == set(REDUCTIONS) >= {row.reduction for row in ENGINES.values()}


def in_parallel(rank, store):
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

    mesh = dist.init_device_mesh("cpu", (2,))
    layer, x = plain(bias=False)
    rows = RowwiseParallel(input_layouts=Replicate())
    with torch.no_grad():
        y = parallelize_module(layer, mesh, rows)(x)
        torch.save(y.clone(), f"{store}.{rank}")  # waits for the other process


@needs_gloo
def test_two_devices_are_torch_s_tensor_parallelism(tmp_path):
    """In two processes. Without a bias, of which torch gives each a half."""
    store = tmp_path / "store"
    run_ranks(in_parallel, 2, store)
    layer, x = plain(bias=False)
    with torch.no_grad():
        Devices(2, ("",)).share(layer)
        found = layer(x)
    for rank in range(2):
        assert_same(torch.load(f"{store}.{rank}"), found)


def test_an_engine_on_several_devices():
    """Its trainer on one differs from the first layer whose inputs are split on."""
    model, ids = family("llama")
    before = deepcopy(model.state_dict())
    for engine, count in (("vllm_row", 2), ("vllm_row", 4), ("vllm_block", 2)):
        found = certify(model, ids, engine=engine, devices=count)
        assert not found.ok
        assert found.begins == "model.layers.0.self_attn.o_proj"
        assert 1e-4 < found.kl < 0.05
        assert found.weights == ""
        assert [name.rpartition(".")[2] for name in found.split] == [
            "o_proj",
            "o_proj",
            "down_proj",
            "down_proj",
        ]
        assert f"on {count} devices" in str(found)
        given = {"engine": engine, "devices": count, "train_devices": count}
        same = certify(model, ids, **given)
        assert same.ok
        assert same.train.endswith(f"on {count} devices")
        assert certify(model, ids, **given, split=TWO).to_dict() == same.to_dict()
    assert_same(model.state_dict(), before)


def test_the_reduction_is_that_of_the_engine():
    """The trainer has it, unless it is an engine itself."""
    model, ids = family("llama")
    engine = dataclasses.replace(ENGINES["vllm_row"], reduction="ring")
    given = {"engine": engine, "devices": 4, "train_devices": 4}
    found = certify(model, ids[:1], **given)
    assert found.ok
    assert found.reduction == "ring"
    once = ENGINES["vllm_row"]
    found = fp8.parity(
        model,
        ids[:1],
        train=once,
        rollout=engine,
        bound=1.0,
        devices=4,
        train_devices=4,
    )
    assert 1e-5 < found.kl < 0.05
    both = {"train": once, "rollout": once, "devices": 4, "train_devices": 4}
    assert fp8.parity(model, ids[:1], bound=0.0, **both).ok


def test_the_layers_whose_inputs_are_split_make_the_difference():
    model, ids = family("llama")
    high = fp8.Policy(None)
    given = {"train": high, "rollout": high, "bound": 1.0}
    found = fp8.parity(model, ids[:1], **given, devices=2)
    assert found.kl > 0
    assert found.rollout == "high precision on 2 devices"
    assert len(found.layers) == 4
    assert {row.name.rpartition(".")[2] for row in found.layers} == {
        "o_proj",
        "down_proj",
    }


@parametrize(
    "name, changes, message",
    [
        ("mixture", {}, "splits .*experts.down_proj, which is no nn.Linear: name"),
        (
            "hybrid",
            {},
            "Lfm2ForCausalLM has no plan of layers that devices split: name",
        ),
        ("llama", {"split": ["*.o"]}, r"split='\*.o' matches no nn.Linear of Llama"),
        ("llama", {"devices": 0}, "devices must be a whole number from 1, got 0"),
        ("llama", {"devices": 3}, "3 devices cannot split the 256 inputs of .*o_proj"),
        (
            "llama",
            {"devices": 4, "engine": "vllm_block"},
            "4 devices cannot split the 256 inputs .* into whole blocks of 128",
        ),
        (
            "llama",
            {"devices": 16, "sums": "hopper"},
            "16 devices cannot split the 256 inputs .* into whole blocks of 32",
        ),
        (
            "llama",
            {"engine": dataclasses.replace(ENGINES["vllm_row"], reduction="rnig")},
            "did you mean 'ring'",
        ),
    ],
)
def test_bad_arguments(name, changes, message):
    with refuses(message):
        certify(*family(name), **{"devices": 2} | changes)


def test_a_model_of_one_s_own():
    """Names its layers, as an engine of whole experts does."""
    given = {"train": "row_exact", "dtype": None, "devices": 2, "train_devices": 2}
    found = certify(network(), prompts(), split=["blocks.?.2"], **given)
    assert found.ok
    assert found.split == ["blocks.0.2", "blocks.1.2"]
    with refuses("Net has no plan"):
        certify(network(), prompts(), **given)
    model, ids = family("mixture")
    assert not certify(model, ids, devices=2, split=["*.o_proj"]).ok


def test_the_command_and_its_page(tmp_path, capsys):
    page = tmp_path / "certificate.html"
    command = ["parity", "certify", NAME.format("llama"), "--devices", "2"]
    assert main([*command, "--page", str(page), "--json"]) == 1
    values = json.loads(capsys.readouterr().out)
    assert (values["devices"], values["reduction"]) == (2, "once")
    assert "4 whose inputs devices split" in page.read_text()
    command += ["--train-devices", "2", "--split", *TWO]
    assert main(command) == 0
    capsys.readouterr()
    command[1:2] = ["compare"]
    assert main([*command, "--train", "row_exact", "--bound", "0", "--total"]) == 0
    assert "vllm_row on 2 devices" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([*command, "--devices", "two"])
