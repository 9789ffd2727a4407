"""Layers with ScaledTensor weights beside the same layers with the same numbers, plain."""

import weakref

import pytest
import torch
from torch import nn

import fp8
from fp8.casts.scaled_tensor import ScaledTensor, dequantized, scaled
from fp8.training.stored_weights import scale_weights
from tests.shared import (
    Net,
    assert_same,
    both,
    parametrize,
    proves,
    refuses,
    seeded,
    tied,
    warns,
)


def loss(m, ids):
    x = m.conv(m.embed(ids).mT).mT
    x = m.norm(x + m.attention(x, x, x, need_weights=False)[0])
    return m.head(x).square().mean()


def plain():
    """A tied embedding, a convolution, attention, linear layers, norms."""
    return tied(
        Net(
            loss,
            embed=nn.Embedding(24, 16),
            conv=nn.Conv1d(16, 16, 3, padding=1),
            attention=nn.MultiheadAttention(16, 2, batch_first=True),
            norm=nn.LayerNorm(16),
            head=nn.Linear(16, 24, bias=False),
        )
    )


def weights(model):
    return [
        p
        for name, p in model.named_parameters()
        if "weight" in name and "norm" not in name
    ]


def build(format="fp16", recipe=None):
    torch.manual_seed(0)
    model = plain()
    scale_weights(model, weights(model), format, "e4m3")
    return fp8.convert(model, recipe) if recipe else model


def ids(seed=0):
    return torch.randint(24, (3, 5), generator=seeded(seed))


def plain_model(model, recipe=None):
    other = plain()
    for one, same in both(model, other):
        same.data.copy_(dequantized(one.detach()))
    return fp8.convert(other, recipe) if recipe else other


@proves("the field", "weights kept in FP8")
@parametrize(
    "format, recipe",
    [
        *(("fp16", recipe) for recipe in (None, "tensor")),
        *(("e4m3", recipe) for recipe in "unit row nvfp4".split()),
    ],
)
def test_it_computes_what_plain_weights_of_the_same_numbers_do(format, recipe):
    """To the bit, and the gradients are theirs, stored."""
    model = build(format, recipe)
    other = plain_model(model, recipe)
    losses = []
    for each in (model, other):
        torch.manual_seed(0)
        losses.append(each(ids()))
        losses[-1].backward()
    assert_same(*losses)
    kinds = set()
    for p, q in both(model, other):
        kinds.add(type(p.grad))
        stored = isinstance(p.grad, ScaledTensor)
        expected = scaled(q.grad, "e4m3") if stored else q.grad
        assert_same(dequantized(p.grad), dequantized(expected))
    assert kinds == {torch.Tensor, ScaledTensor}


def test_hooks_and_gradients_stay():
    model = plain()
    calls = []
    model.conv.weight.register_hook(lambda grad: calls.append("grad"))
    after = lambda p: calls.append(type(p.grad))  # noqa: E731
    model.conv.weight.register_post_accumulate_grad_hook(after)
    model.attention.in_proj_weight.requires_grad_(False)
    model(ids()).backward()
    calls.clear()
    gradient = scaled(model.conv.weight.grad.clone(), "e4m3")
    names = list(dict(model.named_parameters()))
    assert len(scale_weights(model, weights(model), "fp16", "e4m3")) == 4
    assert list(dict(model.named_parameters())) == names
    assert type(model.norm.weight) is type(model.conv.bias) is nn.Parameter
    assert_same(dequantized(model.conv.weight.grad), dequantized(gradient))
    model(ids()).backward()
    assert calls == ["grad", ScaledTensor]
    assert model.attention.in_proj_weight.grad is None


@parametrize("format", ["fp16", "e4m3"])
def test_files_are_plain_and_exact(format, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    model = build(format)
    state = model.state_dict()
    assert list(state) == list(plain().state_dict())
    assert_same(model.conv.state_dict()["weight"], state["conv.weight"])
    torch.save(state, tmp_path / "model.pt")
    safetensors.save_model(model, tmp_path / "tied.safetensors")
    del state["head.weight"]  # tied, which safetensors has no form for
    safetensors.save_file(state, tmp_path / "model.safetensors")
    left = safetensors.load_model(build(format), tmp_path / "tied.safetensors")
    assert left == (set(), [])
    for read in (
        torch.load(tmp_path / "model.pt", weights_only=True),
        safetensors.load_file(tmp_path / "model.safetensors"),
    ):
        other = build(format)
        with torch.no_grad():
            for p in other.parameters():
                p.zero_()
        assert {type(value) for value in read.values()} == {torch.Tensor}
        other.load_state_dict(read, strict=len(read) > len(state))
        assert isinstance(other.head.weight, ScaledTensor)
        values = ([*map(dequantized, m.parameters())] for m in (model, other))
        assert_same(*values)


@parametrize("dtype, assign", [(torch.float32, False), (torch.bfloat16, True)])
def test_checkpoints_of_plain_models(dtype, assign):
    torch.manual_seed(1)
    other = plain().to(dtype)
    model = build()
    model.load_state_dict(other.state_dict(), assign=assign)
    for name, parameter in model.named_parameters():
        expected = dict(other.named_parameters())[name]
        if isinstance(parameter, ScaledTensor):
            expected = scaled(expected.detach(), "fp16").dequantize()
        assert parameter.dtype == (dtype if assign else torch.float32)
        assert_same(dequantized(parameter), expected.to(parameter.dtype))
    model(ids()).backward()
    assert model.head.weight is model.embed.weight
    other.load_state_dict(model.state_dict())
    assert all(type(p) is nn.Parameter for p in other.parameters())


def test_frozen_weights_that_are_stored_take_another_format():
    layer = fp8.store_frozen(nn.Linear(16, 16).requires_grad_(False))
    for format, dtype in (("e5m2", torch.float8_e5m2), ("fp16", torch.float16)):
        expected = scaled(layer.weight.dequantize(), format).dequantize()
        weight = fp8.store_frozen(layer, format).weight
        assert (weight.format, weight.stored.dtype) == (format, dtype)
        assert_same(weight.dequantize(), expected)


def test_storing_nothing_warns_and_bad_input_is_refused():
    with warns("requires_grad_", fp8.warnings.ConvertWarning):
        fp8.store_frozen(nn.Linear(4, 4))
    with refuses("unknown format 'e2m1'; choose one of 'e4m3'"):
        fp8.store_frozen(nn.Linear(4, 4), "e2m1")
    with refuses(r"store_frozen needs an nn\.Module", TypeError):
        fp8.store_frozen(5)
    stored = fp8.store_frozen(nn.Linear(4, 4).requires_grad_(False))
    with refuses(r"has a level already: .* is a ScaledTensor"):
        fp8.initialize(nn.Sequential(stored, nn.Linear(4, 4)), recipe=None)


def test_a_weight_that_others_hold_does_not_move():
    """torch swaps it, which weak references forbid, as those of DeepSpeed's engine."""
    model = build()
    held = weakref.ref(model.head.weight)
    with refuses(r"Move a model before fp8\.initialize", RuntimeError):
        model.to(torch.float64)
    assert held() is model.head.weight
