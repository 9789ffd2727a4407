"""Recipes with scaling "delayed": what is remembered, when, and by whom."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fp8
from fp8 import RECIPES, AmaxHistory, Cast, Recipe
from tests.fp8.calls import CALLS, name_of, operands
from tests.fp8.products.test_matmul import randn

DELAYED = RECIPES["delayed"]
SHORT = Recipe(
    name="short",
    input=Cast(format="e4m3", scaling="delayed", history=3),
    weight=Cast(format="e4m3", scaling="delayed", history=1),
    grad=Cast(format="e5m2", scaling="delayed", history=2, margin=1),
)


def step(model, x, history, recipe=SHORT, scale=1.0):
    with fp8.autocast(recipe, history=history):
        y = model(x)
    (y * scale).sum().backward()
    return y.detach()


@pytest.mark.proves("the field", "delayed scaling", how="own")
def test_the_scale_is_that_of_the_passes_before():
    """Written out: input of history 3, weight of 1, gradient of 2 and a margin of 2."""
    torch.manual_seed(0)
    layer, history = nn.Linear(8, 4, bias=False), AmaxHistory()
    factors, sizes = [1.0, 64.0, 2.0, 0.5, 1.0, 1.0], {"0": [], "1": [], "grad": []}
    for factor in factors:
        x = factor * randn(5, 8).detach()
        x.requires_grad_()
        layer.weight.grad = None
        y = step(layer, x, history, scale=factor)
        g = torch.full((5, 4), factor)
        scales = {}
        for key, length, t, max_ in (
            ("0", 3, x.detach(), 448.0),
            ("1", 1, layer.weight.detach(), 448.0),
            ("grad", 2, g, 57344.0),
        ):
            known = sizes[key][-length:] or [float(t.abs().max())]
            scales[key] = 2.0 ** math.ceil(math.log2(max(known) / max_))
            sizes[key].append(float(t.abs().max()))
        qx = fp8.quantize(x, "e4m3", scale=scales["0"])
        qw = fp8.quantize(layer.weight, "e4m3", scale=scales["1"])
        qg = fp8.quantize(g, "e5m2", scale=2 * scales["grad"])
        torch.testing.assert_close(y, (qx @ qw.mT).detach())
        torch.testing.assert_close(x.grad, qg @ qw)
        torch.testing.assert_close(layer.weight.grad, qg.mT @ qx)
        layer.weight.data.mul_(1.5)
    assert {k: len(t) for k, t in history.tensors.items()} == {
        "001.linear.0": 3,
        "001.linear.1": 1,
        "001.linear.grad": 2,
    }
    assert history.tensors["001.linear.0"].tolist() == sizes["0"][-1:-4:-1]


def test_the_first_pass_is_current_scaling():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)), randn(5, 8)
    with fp8.autocast("delayed", history=AmaxHistory()):
        y = model(x)
    with fp8.autocast("tensor"):
        z = model(x)
    assert torch.equal(y, z)
    for one, other in zip(
        torch.autograd.grad(y.sum(), model.parameters()),
        torch.autograd.grad(z.sum(), model.parameters()),
        strict=True,
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize("function", CALLS, ids=name_of)
def test_every_product_has_a_history_for_each_operand(function):
    row, history = CALLS[function], AmaxHistory()
    tensors = [t.requires_grad_() for t in operands(row)]
    tensors = [tensors[0] * 1, *tensors[1:]]
    for _ in range(2):
        with fp8.autocast("delayed", history=history):
            function(*row.before, *[t * 1 for t in tensors], **row.kwargs).sum().backward()
        tensors = [t.detach().requires_grad_() for t in tensors]
    kinds = [kind for kind in row.kinds if kind != "none"]
    assert [name.split(".")[0] for name in history.tensors] == ["001"] * (len(kinds) + 1)
    assert all((t > 0).sum() == 2 for t in history.tensors.values())


def test_what_does_not_train_reads_and_does_not_write():
    layer, history = nn.Linear(8, 4), AmaxHistory()
    step(layer, randn(5, 8), history)
    before = history.state_dict()
    with torch.no_grad(), fp8.autocast(SHORT, history=history):
        y = layer(100 * randn(5, 8))
    with torch.inference_mode(), fp8.autocast(SHORT, history=history):
        assert torch.equal(layer(100 * randn(5, 8)), y)
    assert all(torch.equal(t, before[name]) for name, t in history.tensors.items())
    assert y.abs().max() < 30 * step(layer, randn(5, 8), history).abs().max()  # it saturated


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_inf_and_nan_are_not_remembered(bad):
    layer, history = nn.Linear(8, 4), AmaxHistory()
    expected = step(layer, randn(5, 8), history)
    x = randn(5, 8).detach()
    x[0, 0] = bad
    step(layer, x, history)
    assert all(t.isfinite().all() for t in history.tensors.values())
    x[0, 0] = 0
    assert history.tensors["001.linear.0"][0] == x.abs().max()  # of what is finite
    assert torch.equal(step(layer, randn(5, 8), history), expected)


def test_zeros_leave_no_trace():
    layer, history = nn.Linear(8, 4, bias=False), AmaxHistory()
    assert not step(layer, torch.zeros(5, 8), history).any()
    expected = step(layer, randn(5, 8), AmaxHistory())
    assert torch.equal(step(layer, randn(5, 8), history), expected)


def train(history, steps, state=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if state is not None:
        model.load_state_dict(state["model"])
        history.load_state_dict(state["history"])
    for i in steps:
        for half in (0, 1):  # two micro-batches, each forward before either backward
            with fp8.autocast("delayed", history=history):
                loss = F.mse_loss(model(randn(6, 8, seed=2 * i + half)), randn(6, 4, seed=i))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {
        "model": {k: v.clone() for k, v in model.state_dict().items()},
        "history": history.state_dict(),
    }


def test_resumed_training_is_the_same(tmp_path):
    whole = train(AmaxHistory(), range(6))
    torch.save(train(AmaxHistory(), range(3)), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    resumed = train(AmaxHistory(), range(3, 6), state)
    for part in whole:
        assert whole[part].keys() == resumed[part].keys()
        assert all(torch.equal(t, resumed[part][name]) for name, t in whole[part].items())
    assert all((t > 0).sum() == 12 for t in whole["history"].values())  # each micro-batch is one


def test_two_forward_passes_before_two_backward_passes():
    layer, history = nn.Linear(8, 4), AmaxHistory()
    with fp8.autocast(SHORT, history=history):
        first = layer(randn(5, 8))
    with fp8.autocast(SHORT, history=history):
        second = layer(2 * randn(5, 8))
    (first.sum() + second.sum() * 4).backward()
    assert sorted(history.tensors["001.linear.grad"].tolist()) == [1, 4]


def test_compiled():
    torch._dynamo.reset()

    def run(compiled):
        torch.manual_seed(0)
        model, history = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)), AmaxHistory()

        def forward(x):
            with fp8.autocast(SHORT, history=history):
                return model(x).square().sum()

        if compiled:
            with torch.no_grad():
                forward(randn(5, 8))
            forward = torch.compile(forward, fullgraph=True, backend="aot_eager")
        for i in range(4):
            forward(randn(5, 8, seed=i).detach() * 2**i).backward()
        return [p.grad for p in model.parameters()], history.tensors

    (grads, eager), (compiled_grads, compiled) = run(False), run(True)
    for one, other in zip(grads, compiled_grads, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-4 * float(one.abs().max()))
    for name in eager:
        torch.testing.assert_close(compiled[name], eager[name])
    torch._dynamo.reset()


@pytest.mark.parametrize("recipe", ["delayed", "static"])
def test_the_first_pass_of_a_compiled_function(recipe: str):
    """It creates the histories while the graph is traced, and is compiled as every later one."""
    gated = nn.ModuleDict({name: nn.Linear(16, 16) for name in ("up", "gate", "down")})

    def net(x: Tensor) -> Tensor:
        return gated["down"](nn.functional.silu(gated["gate"](x)) * gated["up"](x))

    def run(compiled: bool) -> tuple[list[Any], dict[str, Tensor]]:
        torch._dynamo.reset()
        history = AmaxHistory()

        def forward(x: Tensor) -> Tensor:
            with fp8.autocast(recipe, history=history):
                return net(x).sum()

        if compiled:
            forward = torch.compile(forward, fullgraph=True, backend="aot_eager")
        found = []
        for i in range(3):
            gated.zero_grad()
            forward((randn(8, 16, seed=i) * 2**i).detach()).backward()
            found += [p.grad.clone() for p in gated.parameters()]
        return found, history.tensors

    (grads, tensors), (compiled_grads, compiled) = run(False), run(True)
    for one, other in zip(grads, compiled_grads, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-4 * float(one.abs().max()))
    torch.testing.assert_close(compiled, tensors)
    assert len(tensors) == 9
    torch._dynamo.reset()


def test_a_graph_does_not_measure_scales_that_a_pass_has_set():
    torch._dynamo.reset()
    layer, history = nn.Linear(8, 4), AmaxHistory()

    def forward(x: Tensor) -> Tensor:
        with fp8.autocast("static", history=history):
            return layer(x)

    x = randn(5, 8).detach()
    forward(x).sum().backward()
    scales = history.state_dict()
    assert history.known == set()  # nothing has read them
    torch.compile(forward, fullgraph=True, backend="eager")(x)
    assert history.known == set(scales)
    history.load_state_dict({name: torch.zeros_like(t) for name, t in scales.items()})
    assert history.known == set()
    large = 100 * randn(5, 8).detach()
    y = torch.compile(forward, fullgraph=True, backend="eager")(large)
    assert torch.equal(y, forward(large))  # measured anew
    torch._dynamo.reset()


def test_a_layer_of_several_products_that_is_compiled_before_its_first_pass_warns():
    torch._dynamo.reset()
    model = fp8.convert(nn.Sequential(nn.MultiheadAttention(16, 2, batch_first=True)), "delayed")
    layer, x = model[0], randn(2, 4, 16)
    fast = torch.compile(lambda x: layer(x, x, x)[0], backend="eager")
    with pytest.warns(fp8.PitfallWarning, match="runs in eager mode, now and later"):
        y = fast(x)
    assert torch.equal(y, layer(x, x, x)[0])
    torch._dynamo.reset()


def test_refusals():
    with pytest.raises(ValueError, match=r"history=fp8.AmaxHistory\(\), not None"):
        fp8.autocast("delayed")
    with pytest.raises(ValueError, match=r"open fp8\.autocast"):
        fp8.products.matmul.linear(randn(5, 8), randn(4, 8), recipe=DELAYED)
    with pytest.raises(ValueError, match="grad_weight_grad cannot have scaling"):
        dataclasses.replace(DELAYED, grad_weight_grad=DELAYED.grad)
    for fields in ({"history": 0}, {"history": 5000}, {"history": 2, "scaling": "tensor"}):
        with pytest.raises(ValueError, match="history of scaling"):
            Cast(**{"format": "e4m3", "scaling": "delayed"} | fields)
    with pytest.raises(ValueError, match="has no margin"):
        Cast(format="e4m3", margin=1)
    history = AmaxHistory()
    step(nn.Linear(8, 4), randn(5, 8), history)
    with pytest.raises(ValueError, match=r"has shape \(3,\), and the recipe"):
        step(nn.Linear(8, 4), randn(5, 8), history, DELAYED)
    with pytest.raises(TypeError, match="no float32 tensor"):
        history.load_state_dict({"001.linear.0": [1.0]})


def test_loading_replaces_everything():
    history, other = AmaxHistory(), AmaxHistory()
    other.tensors = {"a": torch.ones(2), "b": torch.ones(3)}
    history.tensors = {"a": torch.zeros(2), "c": torch.ones(2)}
    kept = history.tensors["a"]
    history.load_state_dict(other.state_dict())
    assert history.tensors.keys() == {"a", "b"}
    assert history.tensors["a"] is kept
    assert kept.tolist() == [1, 1]


def test_reduce_takes_the_largest(tmp_path):
    history = AmaxHistory()
    history.tensors = {"a": torch.tensor([1.0, 5.0]), "b": torch.tensor([3.0])}
    history.reduce()  # one process, as a script for many may be run: no process group needed
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1
    )
    try:
        history.reduce()
    finally:
        torch.distributed.destroy_process_group()
    assert {k: t.tolist() for k, t in history.tensors.items()} == {"a": [1, 5], "b": [3]}


def test_a_layer_that_is_written_out_goes_on_counting():
    attention, history = nn.MultiheadAttention(8, 2, batch_first=True), AmaxHistory()
    linear, x = nn.Linear(8, 8), randn(2, 5, 8)
    with fp8.autocast("delayed", history=history):
        linear(attention(x, x, x, need_weights=False)[0])
    products = sorted({name.rpartition(".")[0] for name in history.tensors})
    assert products == ["001.linear", "002.attention", "003.linear", "004.linear"]


def test_what_would_be_recomputed_or_has_no_place_for_it_is_refused():
    layer, history = nn.Linear(8, 4), AmaxHistory()
    with (
        fp8.autocast("delayed", history=history),
        pytest.raises(NotImplementedError, match="other scales"),
    ):
        torch.utils.checkpoint.checkpoint(
            layer, randn(5, 8), use_reentrant=False, context_fn=fp8.checkpoint_contexts
        )


@pytest.mark.parametrize("recipe", ["delayed", "static"])
def test_a_pass_of_a_part_of_the_model_is_an_error(recipe):
    """Its products have the numbers of others, and would be scaled by their histories."""
    model, history = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)), AmaxHistory()
    x = randn(5, 8).detach()
    for _ in range(2):
        with fp8.autocast(recipe, history=history):
            model(x)
    part = "001.linear multiplied a weight of shape .16, 8. before, and of shape .4, 16. now"
    with fp8.autocast(recipe, history=history), pytest.raises(ValueError, match=part):
        model[1](randn(5, 16).detach())
    with fp8.autocast(recipe, history=AmaxHistory()):
        assert model[1](model[0](x)).isfinite().all()


def loop_over(stack: nn.Parameter, experts: list[int], history: AmaxHistory) -> Tensor:
    x = torch.ones(2, 16)
    with fp8.autocast("delayed", history=history):
        for expert in experts:
            x = nn.functional.linear(x, stack[expert])
        return x @ torch.eye(16)


@pytest.mark.parametrize("experts", [[0, 2, 3], [0, 1, 3], [0], []], ids=str)
def test_a_loop_that_leaves_out_other_experts_is_an_error(experts):
    """Products after the first that is left out would be scaled by the history of another."""
    stack = nn.Parameter(torch.randn(4, 16, 16, generator=torch.Generator().manual_seed(0)))
    history = AmaxHistory()
    for _ in range(2):
        loop_over(stack, [0, 1, 2], history)
    before = history.state_dict()
    with pytest.raises(ValueError, match=r"multiplied matrix . of a stack of weights before, and"):
        loop_over(stack, experts, history)
    with torch.no_grad():
        loop_over(stack, [0, 1, 2], history)
    assert history.state_dict().keys() == before.keys()
