"""What `unit_scale` makes of a model: values, kinds, rates and a report."""

import importlib
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import unit_scaling as uu
from tests.shared import (
    Net,
    assert_close,
    assert_same,
    both,
    filterwarnings,
    linears,
    pairs,
    parametrize,
    proves,
    refuses,
    rms,
    seeded,
)
from tests.transforms.models import GPT, KINDS, batch, gpt, graphs, own
from unit_scaling.parameter import tag
from unit_scaling.transforms import unit_scale

attention = F.scaled_dot_product_attention


@proves("unit-scaling", "the unit-scaled MLP")
def test_mlp_is_the_hand_written_one():
    """With the factors of its products in the weights."""
    plain = linears(16, 64, nn.GELU, 8).double()
    x = torch.randn(32, 16, requires_grad=True, dtype=torch.float64)
    model = unit_scale(plain, batch=x)
    units = [layer.weight / rms(layer.weight) for layer in (plain[0], plain[2])]
    hidden = F.gelu(F.linear(x, units[0]) / 4)
    number = model[2].weight.mup_scale * 64  # of an operand off RMS 1
    expected = number * F.linear(hidden, units[1]) / 64
    assert_close(model(x), expected, rtol=1e-6, atol=1e-9)


@proves("unit-scaling", "unit_scale(model)", "skip and residual additions")
@proves("the field", "unit scaling")
def test_every_operand_has_unit_scale():
    plain, ids = GPT(width=128, heads=2), torch.randint(0, 65, (8, 64))
    model = unit_scale(plain, batch=(ids, ids.roll(-1, 1)))
    found = uu.verify(model, (ids, ids.roll(-1, 1)))
    assert found.share("activation") > 0.9
    assert found.share("weight") == 1


@proves("unit-scaling", "with torch.compile", "skip and residual additions")
@parametrize("name", [name for name, kind in KINDS.items() if kind.whole])
def test_a_compiled_graph_is_that_of_the_plain_model(name):
    """Also of a model that has run."""
    kind, plain = KINDS[name], KINDS[name].make().double()
    x = kind.batch()
    model = unit_scale(plain)
    model(x)
    expected = graphs(plain, (x,), fullgraph=True)
    assert graphs(model, (x,), fullgraph=True) == expected
    assert graphs(unit_scale(plain, batch=x), (x,), fullgraph=True) == expected


@parametrize("layers", [1, 2, 4, 16])
def test_branches_of_completep_are_equal_parts_of_the_stream(layers):
    """Of 4 / branches of its input, and of at most 1 / sqrt(2)."""
    rule, branches = uu.completep_residual_scaling_rule(), 2 * layers
    stream = 1.0
    for index in range(branches):
        part = rule(index, branches) * stream
        assert part == pytest.approx(min(2**-0.5, 4 / branches))
        stream = math.hypot(stream, part)
    stack = uu.TransformerStack(
        layers, rule, hidden_size=8, heads=2, is_causal=True, dropout_p=0
    )
    assert [layer.mlp_tau for layer in stack] == [
        rule(2 * i + 1, branches) for i in range(layers)
    ]
    assert {p.mup_scaling_depth for p in stack.parameters()} == {None}


def layers():
    linear = {name: nn.Linear(16, 16) for name in "abc"}
    return {**linear, "rnn": nn.GRU(16, 16), "head": nn.Linear(16, 16)}


RESIDUAL = {
    "pre-norm": (lambda m, x: x + m.a(F.layer_norm(x, (16,))), "a"),
    "two": (lambda m, x: (y := x + m.a(x)) + m.b(y), "ab"),
    "through a view": (
        lambda m, x: (x.view(2, 4, 16) + m.a(x).view(2, 4, 16)).view(8, 16),
        "a",
    ),
    "attention": (lambda m, x: x + m.a(attention(x, x, x)), "a"),
    "nested": (lambda m, x: x + m.a(x + m.b(x)), "ab"),
    "parallel": (lambda m, x: x + m.a(x) + m.b(x), "ab"),
    "in place": (lambda m, x: F.gelu(x).add_(m.a(F.gelu(x))) + 0, ""),
    "gelu by hand": (lambda m, x: m.a(x + 0.044715 * x**3), ""),
    "not residual": (lambda m, x: m.a(x) + m.b(x), ""),
    "recurrent": (lambda m, x: x + m.rnn(x)[0], ""),
}


@parametrize("name", RESIDUAL)
def test_residual_branches_are_found(name):
    """Their last weights have less than their rule, RMS 1, or are not alone in it."""
    forward, inside = RESIDUAL[name]
    model = unit_scale(
        Net(lambda m, x: m.head(forward(m, x)), **layers()), batch=batch_of(8, 16)
    )
    read = {row.path for row in uu.report(model) if row.done == "scaled"} - {
        "head",
        "rnn",
    }
    found = {path for path in read if model.get_submodule(path).weight.mup_scale < 0.23}
    assert found == set(inside)


def batch_of(*shape):
    return torch.randn(shape, generator=seeded(1))


def _delta_rule(m, x):
    k, v = F.normalize(m.a(x), dim=-1), m.b(x)
    state = x.new_zeros(16, 16)
    for i in range(len(x)):
        state = state + torch.outer(v[i] - state.mv(k[i]), k[i])
    return x @ state


def _solver(m, x):
    for _ in range(4):
        k = m.a(torch.tanh(x))
        x = x + (k + m.a(torch.tanh(x + k / 4))) / 8
    return m.b(x)


def _ladder(m, x):
    """Of exponentially many paths."""
    for _ in range(60):
        x = m.a(x) + m.b(x)
    return x


@parametrize("forward", [_delta_rule, _solver, _ladder])
def test_sums_in_a_loop_keep_their_coefficients(forward):
    """With weights of the terms, a delta rule grew without bound and a solver diverged."""
    model = unit_scale(Net(forward, **layers()), batch=batch_of(64, 16))
    assert model.a.weight.mup_scale == pytest.approx(1 / 4, rel=0.5)
    assert model(batch_of(64, 16)).isfinite().all()


READS_OF_GAINS = {
    "multiplied": ((32,), lambda m, x: m.gain * m.layer(x), True),
    "of a residual branch": (
        (32,),
        lambda m, x: m.layer(x + m.gain * m.layer(x)),
        True,
    ),
    "of three dimensions": ((1, 1, 32), lambda m, x: m.gain * m.layer(x), True),
    "of a norm": ((32,), lambda m, x: F.rms_norm(m.layer(x), (32,), m.gain), True),
    "one plus it": ((32,), lambda m, x: m.layer(x) * (1 + m.gain), False),
    "of a formula": (
        (32,),
        lambda m, x: m.layer(x) * (m.gain * m.gain).sum().exp(),
        False,
    ),
}


@parametrize("name", READS_OF_GAINS)
def test_a_gain_that_multiplies_values_alone_is_scaled(name):
    """Whatever its shape (vit-pytorch's are (1, 1, n), torchvision's (n, 1, 1)). One that does more
    keeps its values."""
    shape, forward, scaled = READS_OF_GAINS[name]
    gain = nn.Parameter(torch.full(shape, 0.02))
    model = Net(forward, layer=nn.Linear(32, 32), gain=gain)
    ours = unit_scale(model, batch=batch_of(64, 32))
    assert (rms(ours.gain) > 0.1) == scaled
    assert not scaled or ours.gain.mup_type == "norm"
    assert not uu.report(ours).left_alone
    kept = [row.what for row in uu.report(ours) if row.done == "keeps its values"]
    assert kept == ([] if scaled else ["gain"])


def _beside(m, x):
    return m.head(torch.cat([m.added.expand(len(x), -1, -1), m.layer(x)], 1))


READS = {
    "positions": (lambda m, x: m.head(m.layer(x) + m.added[:, :6]), "bias"),
    "positions of large values": (
        lambda m, x: m.head(64 * m.layer(x) + m.added),
        "bias",
    ),
    "class token": (_beside, "bias"),
    "bias of attention": (
        lambda m, x: m.head(attention(*[m.layer(x)] * 3, m.added[..., :6])),
        "bias",
    ),
    "positions and logits": (
        lambda m, x: (m.layer(x) + m.added) @ m.added.mT,
        "weight",
    ),
}


@parametrize("start", [0.0, 0.02])
@parametrize("name", READS)
def test_what_is_added_to_values_learns_as_a_bias(name, start):
    """By its own size, its rate is too low to reach that of the values: a DiT ended at .76 for .35,
    as its positions did not learn."""
    forward, kind = READS[name]
    layers = {n: nn.Linear(16, s, bias=False) for n, s in (("layer", 16), ("head", 4))}
    net = Net(forward, **layers, added=nn.Parameter(start * torch.randn(1, 6, 16)))
    model = unit_scale(net)
    optimizer = uu.optim.AdamW(model.parameters(), lr=0.5)
    (model(torch.randn(8, 6, 16)) - 1).square().sum().backward()
    assert model.added.mup_type == kind
    assert_close(model.added.detach(), net.added.detach())
    optimizer.step()
    if kind == "bias":
        size = 64 if "large" in name else 1
        change = (model.added - net.added).abs().max()
        assert change.item() == pytest.approx(0.5 / 32 * size, rel=0.01)


@parametrize("inputs", [1, 8, 15, 16, 64])
def test_biases_of_few_inputs_are_scaled_as_the_result(inputs):
    """There they are no small part of it: features of one input differ by them."""
    plain, x = nn.Linear(inputs, 64), batch_of(256, inputs)
    model = unit_scale(nn.Sequential(plain, nn.ReLU(), nn.Linear(64, 4)), batch=x)
    expected = plain(x) if inputs < 16 else plain(x) - plain.bias
    result = model[0](x)
    assert_close(result * (rms(plain.weight) / rms(model[0].weight)), expected)


ADAM = {"eps": 1e-30}
STEPPED = [
    (uu.optim.AdamW, {"weight_decay": 1e-3, **ADAM}),
    (uu.optim.Adam, ADAM),
    (uu.optim.SGD, {"momentum": 0.9, "weight_decay": 1e-3}),
]


@parametrize("cls, settings", STEPPED)
def test_steps_are_those_of_weights_at_unit_scale(cls, settings):
    """w = f u moves as u, an independent weight of RMS 1 with the learning rate of its rule."""
    w = nn.Linear(64, 32).double()
    scales, kinds = [2.0**-2, 2.0**-3], ["weight", "bias"]
    u = []
    for p, f, kind in pairs(w.parameters(), scales, kinds):
        tag(p, kind, mup_scale=f)
        u.append(uu.Parameter(p.detach() / f, kind))
    x, y = torch.randn(16, 64).double(), torch.randn(16, 32).double()
    ours, theirs = cls(w.parameters(), lr=0.1, **settings), cls(u, lr=0.1, **settings)
    for _ in range(3):
        ours.zero_grad()
        theirs.zero_grad()
        (w(x) - y).square().sum().backward()
        (F.linear(x, scales[0] * u[0], scales[1] * u[1]) - y).square().sum().backward()
        ours.step()
        theirs.step()
    for p, q, f in pairs(w.parameters(), u, scales):
        assert_close(p.detach(), f * q.detach(), rtol=1e-6, atol=1e-9)


def test_weights_of_experts_are_stacks():
    up, bias = nn.Parameter(torch.randn(3, 16, 32)), nn.Parameter(torch.randn(3, 32))
    experts = Net(lambda m, x: x, up=up, up_bias=bias)
    model = unit_scale(nn.Sequential(nn.Linear(8, 16), experts, nn.Linear(16, 4)))
    assert [p.mup_stacked for p in (model[1].up, model[0].weight)] == [True, False]
    assert model[1].up_bias.mup_type == "bias"


LAST = {
    "lstm": (
        lambda: nn.LSTM(32, 32, batch_first=True),
        lambda m, x: m.head(m.body(x)[0]),
    ),
    "cnn": (lambda: nn.Conv1d(32, 32, 3, padding=1), lambda m, x: m.head(m.body(x).mT)),
    "embedding": (lambda: nn.Embedding(16, 32), lambda m, x: m.head(m.body(x))),
    "residual": (lambda: nn.Linear(32, 32), lambda m, x: x + m.head(F.relu(m.body(x)))),
}


@parametrize("kind", LAST)
def test_the_last_linear_layer_is_the_readout_after_layers_with_weights(kind):
    """A linear layer on an embedding alone is a table of logits, none of which is a hidden one; one
    inside of a residual branch is none either."""
    body, forward = LAST[kind]
    x = torch.randn(64, 32, 32)
    if kind == "embedding":
        x = torch.randint(16, (64, 32))
    model = unit_scale(Net(forward, body=body(), head=nn.Linear(32, 32)), batch=x)
    readout = kind in ("lstm", "cnn")
    assert (model.head.weight.mup_type == "output") == readout
    if kind in ("cnn", "embedding"):
        expected = 32**-0.5 if readout else 1.0  # of inputs of RMS 1
        assert expected / 2 < rms(model(x)) < 2 * expected


def test_what_an_autograd_function_computes_keeps_its_values():
    """It computes its gradient itself too."""
    product = own(lambda x, w: x @ w.mT, lambda g, x, w: (g @ w, g.mT @ x))
    forward = lambda m, x: product(torch.relu(m.first(x)), m.last.weight)  # noqa: E731
    net = Net(forward, first=nn.Linear(8, 16), last=nn.Linear(16, 4))
    model = unit_scale(net, batch=batch_of(4, 8))
    assert_same(model.last.weight, net.last.weight)
    kept = {
        (row.path, row.what)
        for row in uu.report(model)
        if row.done == "keeps its values"
    }
    assert kept == {("last", "weight"), ("last", "bias")}


@filterwarnings("ignore:Initializing zero-element")
def test_odd_parameters_are_left_with_a_row():
    model = linears(8, 8, 1, 1)
    nn.init.ones_(model[0].weight)
    model = unit_scale(model, batch=batch_of(4, 8))
    assert_same(model[0].weight, torch.ones(8, 8))
    assert {(r.path, r.why) for r in uu.report(model).left_alone} == {
        ("0", "is 1 everywhere")
    }
    bias = nn.Parameter(torch.tensor(0.5))
    net = Net(lambda m, x: m.layer(x) + m.bias, layer=nn.Linear(4, 0), bias=bias)
    assert unit_scale(net)(torch.ones(2, 4)).shape == (2, 0)


def test_layers_of_uu_are_left_as_they_are():
    """Their weights, kinds and depths."""
    stack = uu.DepthSequential(
        uu.Linear(16, 16), nn.Sequential(uu.LayerNorm(16), uu.GELU())
    )
    plain = nn.Sequential(nn.Linear(16, 16), stack, uu.LinearReadout(16, 4)).double()
    model = unit_scale(plain, batch=batch_of(64, 16).double())
    assert {row.path for row in uu.report(model)} <= {"", "0"}
    assert not uu.report(model).left_alone
    for before, after in both(plain[1:], model[1:]):
        assert_same(before, after)
        assert before.mup_type == after.mup_type
        assert before.mup_scaling_depth == after.mup_scaling_depth


def test_report_counts_every_weight():
    model = unit_scale(gpt())
    assert "not run yet" in str(uu.report(model))
    model(*batch())
    report = uu.report(model)
    assert not report.left_alone
    scaled = {f"{row.path}.{row.what}" for row in report if row.done == "scaled"}
    assert {name for name, p in model.named_parameters() if p.dim() > 1} <= scaled
    assert "blocks.1.down" in str(report)
    # Makes functions look at frames.
    importlib.import_module("torch.distributed.pipelining.stage")
    assert_same(model(*batch())[0], model(*batch())[0])


@parametrize(
    "call, error, match",
    [
        (lambda: unit_scale("model"), TypeError, "needs an nn.Module, got str"),
        (
            lambda: uu.report(nn.Linear(2, 2)),
            ValueError,
            "report needs a model of unit_scale",
        ),
        (
            lambda: unit_scale(gpt(), batch=(torch.ones(2, 4),)),
            RuntimeError,
            "to have one of the",
        ),
    ],
)
def test_bad_input(call, error, match):
    with refuses(match, error):
        call()
