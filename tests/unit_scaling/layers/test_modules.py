"""Modules: what torch's do, scaled, with tagged parameters that stay tagged."""

import copy
import inspect
from collections import OrderedDict

import torch
from torch import nn

import unit_scaling as uu
import unit_scaling.functional as U
from tests.shared import assert_close, assert_same, parametrize, pickled, refuses, saved
from unit_scaling.constraints import CONSTRAINTS


def test_exports():
    assert len(uu.__all__) == len(set(uu.__all__))
    assert all(
        hasattr(space, name) for space in (uu, uu.modules) for name in space.__all__
    )


def test_state_dict_is_plain_and_loads_weights_only():
    layer = uu.Linear(3, 2, bias=True)
    assert not any(hasattr(v, "mup_type") for v in layer.state_dict().values())
    state = saved(layer.state_dict(keep_vars=True))
    assert state["weight"].mup_type == "weight"


# --- single layers -------------------------------------------------------------------------


def test_settings_of_modules_come_first_for_activations_alone():
    x = torch.randn(4, 6)
    assert_same(uu.LeakyReLU(2.0, None, 0.3)(x), U.leaky_relu(x, 2.0, None, 0.3))
    assert_same(
        uu.AvgPool1d(2, constraint=None)(x), U.avg_pool1d(x, 2, constraint=None)
    )
    assert_same(uu.Softmax(0, 2.0)(x), U.softmax(x, 0, mult=2.0))
    assert_same(uu.Softmax()(x), U.softmax(x, 1))


@parametrize("kind", [uu.GELU, uu.Linear, uu.AvgPool1d, uu.Conv2d, uu.GLU])
def test_a_constraint_is_a_name_of_one(kind):
    """Refused when the module is made, not at its first call."""
    arguments = inspect.signature(kind).parameters.values()
    sizes = dict.fromkeys([p.name for p in arguments if p.default is p.empty], 2)
    for constraint in (None, "", *CONSTRAINTS):
        assert kind(**sizes, constraint=constraint).constraint == constraint
    with refuses("unknown constraint 'to_output'; choose one of None"):
        kind(**sizes, constraint="to_output")


@parametrize("padding", [0, (2,), "same"])
def test_padding_that_is_not_of_zeros(padding):
    args = {"padding": padding, "padding_mode": "circular", "dilation": (2,)}
    ours = uu.Conv1d(4, 6, 5, bias=True, dtype=torch.float64, **args)
    plain = nn.Conv1d(4, 6, 5, dtype=torch.float64, **args)
    plain.load_state_dict(ours.state_dict())
    x = torch.randn(2, 4, 16).double()
    assert_close(ours(x), plain(x) * (4 * 5) ** -0.5)


def test_frozen_embedding():
    weight = torch.randn(5, 3)
    assert not uu.Embedding(5, 3, _weight=weight, _freeze=True).weight.requires_grad
    assert not uu.Embedding.from_pretrained(weight).weight.requires_grad
    module = uu.Embedding.from_pretrained(weight, freeze=False, padding_idx=2)
    assert module.weight.requires_grad
    assert module.weight.mup_type == "weight"
    assert module.padding_idx == 2
    assert not uu.Embedding(5, 3, padding_idx=1).weight[1].any()


# --- transformer ---------------------------------------------------------------------------


def test_attention_module_has_no_dropout_in_eval():
    x, module = torch.randn(2, 8, 16), uu.MHSA(16, 4, is_causal=True, dropout_p=0.5)
    assert not torch.equal(module(x), module(x))
    module.eval()
    assert_same(module(x), module(x))
    assert_close(module(x)[0], module(x[0]))
    assert repr(uu.MHSA(16, 4, False)).startswith("MHSA(\n  heads=4, is_causal=False\n")
    grouped = repr(uu.MHSA(16, 4, True, kv_heads=2))
    assert "heads=4, is_causal=True, kv_heads=2" in grouped


def test_decoder_at_initialisation():
    """Gradients of every parameter have RMS about 1; u-muP leaves the logits small."""
    model = uu.TransformerDecoder(128, 65, layers=4, heads=4)
    tokens = torch.randint(65, (4, 64))
    logits = model(tokens)
    assert logits.shape == (4, 64, 65)
    model.loss(tokens).backward()
    for name, p in model.named_parameters():
        # within a factor of 8: scales are constrained, and query and key share the value's
        assert 1 / 8 < p.grad.square().mean().sqrt() < 8, name
    assert (
        list(dict(model.named_children()))
        == "embedding layers final_norm projection".split()
    )


# --- depth ---------------------------------------------------------------------------------


def depths(module):
    return {p.mup_scaling_depth for p in module.parameters()}


def layer():
    return uu.Linear(2, 2)


def linears(n):
    return [layer() for _ in range(n)]


each_container = parametrize(
    "make",
    [lambda m: uu.DepthSequential(*m), uu.DepthModuleList],
    ids=["Sequential", "ModuleList"],
)


@each_container
def test_depths_multiply_and_stay_with_slices_and_copies(make):
    assert depths(make([make(linears(4)) for _ in range(3)])) == {12}
    assert depths(make([make(linears(1))])) == {1}
    stack = make(linears(4))
    assert (depths(stack[1:3]), len(stack[1:3])) == ({4}, 2)
    assert stack[1:3][0] is stack[1]
    for copied in (copy.deepcopy(stack), pickled(stack)):
        assert depths(copied) == {4}
        copied.append(layer())
        assert depths(copied) == {5}
    with refuses(r"parameter '1\.weight' has no mup_type"):
        make([layer(), nn.Linear(2, 2)])


#: What is done to a stack of 4 layers -> its depth. Layers that leave have none.
RESIZED = {
    "append": (lambda stack: stack.append(layer()), 5),
    "extend": (lambda stack: stack.extend(linears(2)), 6),
    "insert": (lambda stack: stack.insert(0, layer()), 5),
    "pop": (lambda stack: stack.pop(0), 3),
    "del": (lambda stack: stack.__delitem__(0), 3),
    "add": (lambda stack: stack.__iadd__(linears(1)), 5),
}


@each_container
@parametrize("how", RESIZED)
def test_depths_follow_the_size(make, how):
    resize, depth = RESIZED[how]
    stack = make(linears(4))
    before = list(stack)
    resize(stack)
    assert depths(stack) == {depth}
    assert all(depths(part) == {None} for part in before if part not in list(stack))


def test_depth_of_named_and_shared_layers():
    shared = layer()
    twice = uu.DepthSequential(shared, shared)
    assert depths(twice) == {2}
    assert len(twice[:2]) == 2  # a layer that stands twice is no duplicate
    named = uu.DepthSequential(OrderedDict(a=layer(), b=layer()))
    assert depths(named) == {2}
    assert list(dict(named[1:].named_children())) == ["b"]
