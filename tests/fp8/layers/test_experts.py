"""Mixtures of experts of the library transformers: real classes, tiny, in all implementations."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fp8
from fp8.layers.roles import with_role
from fp8.layers.select import layers_of
from tests.fp8.compare import assert_same, outcome

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers", reason="its models")

pytestmark = pytest.mark.filterwarnings("ignore")  # its own

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
OWN: dict[str, dict[str, Any]] = {
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

each_model = pytest.mark.parametrize("name", OWN)


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging.getLogger("transformers").setLevel(logging.ERROR)


def make(name: str, implementation: str = "grouped_mm") -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **OWN[name]})
    return getattr(transformers, f"{name}ForCausalLM")._from_config(
        config, experts_implementation=implementation
    )


def block_of(model: Any) -> Any:
    return model.model.layers[1].mlp


def batch() -> dict[str, Tensor]:
    ids = torch.randint(64, TOKENS, generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def x_of(dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*TOKENS, 24, generator=generator).to(dtype).requires_grad_()


def output(block: Any, x: Tensor) -> Tensor:
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

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, Tensor]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        y = function(*args, **(kwargs or {}))
        if function.overloadpacket in PRODUCTS:
            operands = [args[i] for i in PRODUCTS[function.overloadpacket]]
            tokens = TOKENS[0] * TOKENS[1]
            if not any({*t.shape} == {tokens, EXPERTS} for t in (*operands, y)):
                self.found += [(str(function), t.detach().clone()) for t in operands]
        return y


def has_four_bits(x: Tensor) -> bool:
    """Whether every value has at most four significant bits, as in e4m3 times a power of two."""
    mantissa = torch.frexp(x.double())[0] * 16
    return bool((mantissa == mantissa.round()).all())


E4M3 = fp8.Cast(format="e4m3", scaling="tensor")
ALL = fp8.Recipe(name="all", input=E4M3, weight=E4M3, grad=E4M3)


@pytest.mark.parametrize(
    ("name", "implementation"),
    [*((name, "grouped_mm") for name in OWN), ("Mixtral", "eager"), ("Mixtral", "batched_mm")],
)
def test_every_product_of_the_experts_is_cast(name: str, implementation: str) -> None:
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


def train(model: nn.Module, steps: int = 12) -> list[float]:
    losses, data = [], batch()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(steps):
        loss = model(**data).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("recipe", "implementation"),
    [("mxfp8", "grouped_mm"), ("static", "grouped_mm"), ("delayed", "batched_mm")],
)
def test_recipes_and_implementations(recipe: str, implementation: str) -> None:
    model = make("Mixtral", implementation)
    fp8.convert(model, recipe)
    if recipe == "static":
        fp8.calibrate(model, batch())
    losses = train(model, 6)
    assert losses[-1] < losses[0] - 0.5
    other = fp8.convert(make("Mixtral", implementation), recipe)
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(other.eval()(**batch()).logits, model.eval()(**batch()).logits)


@each_model
def test_the_router_is_found_and_stays(name: str) -> None:
    """By its role, although its product is its own: convert leaves it alone."""
    model = make(name)
    router = f"model.layers.1.mlp.{ROUTER.get(name, 'gate')}"
    found = with_role("router", model, {name: layer for name, layer, _ in layers_of(model)})
    assert router in found
    assert "model.layers.1.mlp.experts" not in found
    fp8.convert(model, fp8.Policy("tensor", keep=("router",)))
    rows = {row.path: row for row in fp8.report(model)}
    assert rows[router].left_alone
    assert rows["model.layers.1.mlp.experts"].done == "converted"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled(dtype: torch.dtype) -> None:
    """In one graph; in float32 transformers calls an operator of its own, which is cast too."""
    torch.compiler.reset()
    experts = fp8.convert(make("Mixtral"), "mxfp8").to(dtype).model.layers[1].mlp.experts
    x = x_of(dtype).flatten(0, 1)
    scores, index = torch.rand(28, EXPERTS).topk(2)
    args = (x, index, scores.to(dtype))
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    leaves = list(experts.parameters())
    eager, graph = (outcome(lambda r=run: r(*args), leaves) for run in (experts, compiled))
    assert_same(graph, eager)
    fp8.revert(experts)
    assert not torch.equal(experts(*args), eager[0])


def test_umup_leaves_experts_as_their_down_projection_joins_the_residual_stream() -> None:
    model = fp8.convert(make("Mixtral"), fp8.Policy.umup("tensor"))
    rows = {r.path: r for r in fp8.report(model)}
    assert "down projections" in rows["model.layers.1.mlp.experts"].why
    rows = {r.path: r for r in fp8.report(fp8.convert(model, fp8.Policy.hidden("tensor")))}
    assert rows["model.layers.1.mlp.experts"].done == "converted"
