"""Mixtures of experts of the library transformers: real classes, tiny, in all implementations."""

import logging

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fp8
from fp8.layers.roles import with_role
from fp8.layers.select import layers_of
from tests.shared import by_path, parametrize, paths, quietly, randn, theirs

with quietly():
    transformers = pytest.importorskip("transformers", reason="its models")

pytestmark = theirs

EXPERTS, TOKENS = 5, (2, 14)
SIZES = {
    "vocab_size": 64,
    "hidden_size": 24,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
}
OWN = {
    "Mixtral": {"num_local_experts": EXPERTS},
    "Qwen3Moe": {"num_experts": EXPERTS, "moe_intermediate_size": 16},
    "DeepseekV3": {
        "n_routed_experts": EXPERTS,
        "moe_intermediate_size": 16,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
    "GptOss": {"num_local_experts": EXPERTS},
}
ROUTER = {"GptOss": "router"}

each_model = parametrize("name", OWN)


@pytest.fixture(autouse=True)
def _quiet():
    logging.getLogger("transformers").setLevel(logging.ERROR)


def make(name, implementation="grouped_mm"):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **OWN[name]})
    return getattr(transformers, f"{name}ForCausalLM")._from_config(
        config, experts_implementation=implementation
    )


def block_of(model):
    return model.model.layers[1].mlp


def x_of(dtype=torch.float32):
    return randn(*TOKENS, 24, dtype=dtype)


def output(block, x):
    y = block(x)
    return y[0] if isinstance(y, tuple) else y


aten = torch.ops.aten
PRODUCTS = {
    aten.mm: (0, 1),
    aten.bmm: (0, 1),
    aten.addmm: (1, 2),
    aten.baddbmm: (1, 2),
    aten._grouped_mm: (0, 1),
    torch.ops.fp8.multiply_groups: (0, 1),
}


class Operands(TorchDispatchMode):
    """Every operand of every product that ATen computes, but of the router's, whose logits and
    their gradient have the shape (tokens, experts)."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        y = function(*args, **(kwargs or {}))
        if function.overloadpacket in PRODUCTS:
            operands = [args[i] for i in PRODUCTS[function.overloadpacket]]
            tokens = TOKENS[0] * TOKENS[1]
            if not any({*t.shape} == {tokens, EXPERTS} for t in (*operands, y)):
                self.found += [(str(function), t.detach().clone()) for t in operands]
        return y


def has_four_bits(x):
    """Whether every value has at most four significant bits, as in e4m3 times a power of two."""
    mantissa = torch.frexp(x.double())[0] * 16
    return bool((mantissa == mantissa.round()).all())


E4M3 = fp8.Cast(format="e4m3", scaling="tensor")
ALL = fp8.Recipe(name="all", input=E4M3, weight=E4M3, grad=E4M3)


@parametrize(
    "name, implementation",
    [
        *((name, "grouped_mm") for name in OWN),
        ("Mixtral", "eager"),
        ("Mixtral", "batched_mm"),
    ],
)
def test_every_product_of_the_experts_is_cast(name, implementation):
    """Forward and both gradients, at what ATen computes; the router's products are not."""
    model = make(name, implementation)
    fp8.convert(model, ALL)
    block, x, seen = block_of(model), x_of(), Operands()
    with seen:
        output(block, x).square().sum().backward()
    assert len(seen.found) >= 2 * 3 * 2
    assert all(has_four_bits(t) for _, t in seen.found)
    plain = Operands()
    with plain:
        output(fp8.revert(block), x).square().sum().backward()
    assert len(plain.found) == len(seen.found)
    assert not any(has_four_bits(t) for _, t in plain.found)


@each_model
def test_the_router_is_found_and_stays(name):
    """By its role, although its product is its own: convert leaves it alone."""
    model = make(name)
    router = f"model.layers.1.mlp.{ROUTER.get(name, 'gate')}"
    layers = {name: layer for name, layer, _ in layers_of(model)}
    found = with_role("router", model, layers)
    assert router in found
    assert "model.layers.1.mlp.experts" not in found
    fp8.convert(model, fp8.Policy("tensor", keep=("router",)))
    rows = by_path(fp8.report(model))
    assert rows[router].left_alone
    assert rows["model.layers.1.mlp.experts"].done == "converted"


def test_umup_leaves_experts_as_their_down_projection_joins_the_residual_stream():
    model = fp8.convert(make("Mixtral"), fp8.Policy.umup("tensor"))
    experts = "model.layers.1.mlp.experts"
    assert "down projections" in by_path(fp8.report(model), "why")[experts]
    fp8.convert(model, fp8.Policy.hidden("tensor"))
    assert experts in paths(fp8.report(model), "converted")
