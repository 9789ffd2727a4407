"""`unit_scale` with a batch: parameters times numbers, in a plain model."""

import math
import sys
from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import unit_scaling as uu
from tests.shared import (
    Net,
    assert_same,
    descend,
    linears,
    parametrize,
    proves,
    refuses,
    rms,
)
from tests.transforms.models import GPT, KINDS, hooks_of, loss_of
from unit_scaling.parameter import tags_of
from unit_scaling.rules.rates import kind_of
from unit_scaling.transforms import unit_scale

approx = pytest.approx
every_kind = parametrize("name", KINDS)


def plain(name, dtype=torch.float64):
    torch.manual_seed(0)
    return KINDS[name].make().to(dtype)


def calls(model, x):
    """The Python calls of a step."""
    loss_of(model, x).backward()
    count = 0

    def counted(frame, event, argument):
        nonlocal count
        count += event == "call"

    sys.setprofile(counted)
    try:
        loss_of(model, x).backward()
    finally:
        sys.setprofile(None)
    return count


@parametrize("pending", [False, True])
@every_kind
def test_the_result_is_a_plain_model(name, pending):
    """Classes, names, hooks, buffers, state_dict and calls are those of the plain model, which
    computes the same from the values."""
    model, x = plain(name), KINDS[name].batch()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    ours = unit_scale(model, batch=None if pending else x)
    if pending:
        loss_of(ours, x)
    assert_same(model.state_dict(), before)
    classes, expected = (
        {n: type(m) for n, m in x.named_modules()} for x in (ours, model)
    )
    assert classes == expected
    assert len(hooks_of(ours)) == len(hooks_of(model))
    assert dict(ours.named_buffers()).keys() == dict(model.named_buffers()).keys()
    other = plain(name)
    other.load_state_dict(ours.state_dict(), strict=True)
    for mode in (True, False):
        results = [loss_of(deepcopy(each).train(mode), x) for each in (ours, other)]
        assert_same(*results)
    assert calls(ours, x) == calls(other, x)


def sizes_of(report):
    """The RMS of each result that a report has."""
    return [
        float(row.why.split("RMS ")[1].split(";")[0])
        for row in report
        if "RMS" in row.why
    ]


@proves("the field", "unit scaling")
@every_kind
def test_results_of_products_have_rms_one(name):
    """Those of residual branches that of their stream times a weight, those of a readout less."""
    ours = unit_scale(plain(name), batch=KINDS[name].batch())
    sizes = sizes_of(uu.report(ours))
    inside = sum(2**-3 <= size <= 4 for size in sizes)
    assert sizes
    assert inside >= len(sizes) - 1
    assert all(2**-12 <= p.mup_scale <= 2**4 for p in ours.parameters())
    assert all(
        tags_of(p).mup_divisor is None or p.isfinite().all() for p in ours.parameters()
    )


def square():
    return nn.Linear(64, 64)


def losses(model, x, optimizer):
    return descend(optimizer, (loss_of(model, x) for _ in range(6)))


LAYOUTS = {
    "linear": (F.linear, lambda w: w),
    "x @ w": (lambda x, w: x @ w, lambda w: w.t()),
    "einsum": (
        lambda x, w: torch.einsum("bi,hio->bho", x, w).flatten(1),
        lambda w: w.view(2, 4, 512).mT,
    ),
    "conv1d": (
        lambda x, w: F.conv1d(x[..., None], w)[..., 0],
        lambda w: w[..., None],
    ),
    "conv_transpose1d": (
        lambda x, w: F.conv_transpose1d(x[..., None], w)[..., 0],
        lambda w: w.t()[..., None],
    ),
}


@parametrize("optimizer", ["AdamW", "SGD"])
@parametrize("name", LAYOUTS)
def test_the_rate_of_a_weight_does_not_depend_on_its_layout(name, optimizer):
    """One layer of 512 inputs and 8 outputs, and a head, in each layout: the losses are equal."""
    weight, head = torch.randn(8, 512).double() / 512**0.5, torch.randn(4, 8).double()
    x, found = torch.randn(64, 512).double(), []
    for each in ("linear", name):
        forward, stored = LAYOUTS[each]
        model = Net(
            lambda m, x, forward=forward: F.linear(F.relu(forward(x, m.w)), m.head)
        )
        model.w = nn.Parameter(
            stored(weight).clone(memory_format=torch.contiguous_format)
        )
        model.head = nn.Parameter(head.clone())
        ours = unit_scale(model, batch=x)
        make = getattr(uu.optim, optimizer)
        opt = make(
            ours.parameters(),
            allow_non_unit_scaling_params=True,
        )
        found.append(losses(ours, x, opt))
    assert found[1] == approx(found[0], rel=1e-9)


def test_the_rate_of_kernels_is_for_convolutions_over_space():
    """Products of the same weights that sum over no positions have that of matrices."""
    x = torch.randn(2, 8, 9)
    calls = {
        "kernel": [F.conv1d, F.conv_transpose1d],
        "weight": [
            lambda x, w: torch.einsum("bip,ioh->bohp", x, w),
            lambda x, w: x.mT[:, None] @ w.permute(2, 0, 1),
        ],
    }
    for kind, functions in calls.items():
        for function in functions:
            model = Net(lambda m, x, function=function: function(x, m.w))
            model.w = nn.Parameter(torch.randn(8, 8, 3))
            ours = unit_scale(model, batch=x)
            assert kind_of(ours.w) == kind


def test_batches_are_those_of_a_call():
    model, x = nn.Linear(8, 8), torch.randn(64, 8)
    made = [unit_scale(model, batch=batch) for batch in (x, (x,), [x], {"input": x})]
    assert all(torch.equal(each.weight, made[0].weight) for each in made)


def test_an_operand_off_rms_one_is_in_the_number():
    model = linears(64, 64, 64)
    for size, number in ((0.01, 100.0), (1.0, 1.0), (2.0, 1.0), (1000.0, 0.001)):
        x = size * torch.randn(512, 64)
        ours = unit_scale(model, batch=x)
        assert ours[0].weight.mup_scale == approx(number / 8, rel=0.1)
        assert ours[1].weight.mup_scale == approx(1 / 64, rel=0.05)  # the readout


@parametrize("shift", [0.0, 1.0])
def test_the_factor_of_a_tied_head_is_in_the_gain_before_it(shift):
    """Also in a gain 1 + w, as Gemma's."""

    def run(m, ids):
        x = m.table(ids)
        x = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        return F.linear(x * (shift + m.gain), m.table.weight)

    gain = nn.Parameter(torch.full((64,), 1 - shift))
    ids = torch.randint(100, (8, 32))
    model = Net(run, table=nn.Embedding(100, 64))
    model.gain = gain
    ours = unit_scale(model, batch=ids)
    assert rms(ours.table.weight) == approx(1, rel=1e-4)
    assert ours.gain.mean().item() + shift == approx(1 / 8, rel=0.05)
    assert ours.gain.mup_scale == approx(1 / 8, rel=0.05)
    assert rms(ours(ids)) == approx(1, rel=0.3)


def test_what_no_parameter_can_hold_is_reported():
    """A tied head without a gain before it, and a branch that ends in an activation."""
    tied = Net(
        lambda m, i: F.linear(m.table(i), m.table.weight), table=nn.Embedding(100, 64)
    )
    branch = Net(lambda m, x: m.b(x + F.silu(m.a(x))), a=square(), b=square())
    for model, batch in (
        (tied, torch.randint(100, (8, 8))),
        (branch, torch.randn(32, 64)),
    ):
        (row,) = uu.report(unit_scale(model, batch=batch)).left_alone
        assert "which no parameter scales alone" in row.why


def test_layers_of_zeros_keep_them_and_have_the_number_of_their_rule():
    """A branch and a readout that begin at zeros: the rate is that of the rule and the weight."""
    layers = {
        "up": square(),
        "down": square(),
        "head": nn.Linear(64, 4),
    }
    model = Net(lambda m, x: m.head(x + m.down(F.relu(m.up(x)))), **layers)
    for layer in (model.down, model.head):
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
    ours = unit_scale(model, batch=torch.randn(256, 64))
    for layer, number in ((ours.down, 2**-0.5 / 8), (ours.head, 1 / 64)):
        assert not layer.weight.any()
        assert layer.weight.mup_scale == approx(number, rel=0.05)
    nn.init.normal_(model.down.weight)
    ours = unit_scale(model, batch=torch.randn(256, 64))
    assert ours.down.weight.mup_scale == approx(2**-0.5 / 8, rel=0.5)


@parametrize("value", [0.0, 0.01])
def test_a_weight_of_one_output_is_no_gain(value):
    """A value head, and a gate within: their use tells them from a layer scale of that shape."""
    model = Net(
        lambda m, x: m.head(F.relu(m.scale * m.up(x)) * m.gate(x).sigmoid()),
        up=square(),
        gate=nn.Linear(64, 1),
        head=nn.Linear(64, 1),
    )
    model.scale = nn.Parameter(torch.full((1, 64), 0.01))
    nn.init.constant_(model.gate.weight, value)
    nn.init.constant_(model.head.weight, value)
    ours = unit_scale(model, batch=torch.randn(256, 64))
    kinds = [tags_of(p).mup_type for p in (ours.gate.weight, ours.head.weight)]
    assert kinds == ["weight", "output"]
    assert_same(ours.gate.weight, model.gate.weight)
    assert_same(ours.head.weight, model.head.weight)
    assert (ours.scale.mup_type, rms(ours.scale)) == ("norm", approx(1))
    if not value:
        assert ours.gate.weight.mup_scale == approx(1 / 8, rel=0.1)
        assert ours.head.weight.mup_scale == approx(1 / 64, rel=0.5)


def test_an_expert_that_the_batch_does_not_reach_is_as_its_siblings():
    experts = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(3))
    model = Net(
        lambda m, x: m.head(m.experts[0](x) + m.experts[1](x)),
        experts=experts,
        head=nn.Linear(16, 4),
    )
    ours = unit_scale(model, batch=torch.randn(64, 16))
    sizes = [(rms(e.weight), e.weight.mup_scale) for e in ours.experts]
    assert sizes[2] == approx(sizes[0], rel=1e-5)


def coordinates(m, x, pool=torch.mean):
    """Layers move points by what they compute of their distances, as an equivariant network."""
    for layer in (m.a, m.b):
        distances = torch.cdist(x, x).unsqueeze(-1)
        x = x + pool((x[:, None] - x[None]) * m.out(F.silu(layer(distances))), 1)
    return x


def stages(m, x):
    first = x + m.a(x)
    return first, first + m.b(F.relu(first))


def logits(m, x):
    """A position bias computed by a layer, and heads that talk before the softmax."""
    scores = m.q(x) @ m.k(x).mT / 8
    scores = scores + m.talk(scores)
    return m.head(scores.softmax(-1) @ x)


NO_STREAMS = {
    "coordinates": (coordinates, {"a": (1, 16), "b": (1, 16), "out": (16, 1)}, (16, 3)),
    "stages": (stages, {"a": (16, 16), "b": (16, 16)}, (64, 16)),
    "logits": (
        logits,
        {"q": (64, 64), "k": (64, 64), "head": (64, 64), "talk": (32, 32)},
        (32, 64),
    ),
}


@parametrize("name", NO_STREAMS)
def test_sums_that_are_no_streams_keep_their_terms(name):
    """Their layers have the number of their rule alone: results of RMS 1 but for readouts."""
    forward, layers, shape = NO_STREAMS[name]
    modules = {layer: nn.Linear(*size) for layer, size in layers.items()}
    ours = unit_scale(Net(forward, **modules), batch=100 * torch.randn(shape))
    rows = uu.report(ours)
    assert not rows.left_alone
    assert all(abs(math.log2(size)) < 0.3 or size < 0.35 for size in sizes_of(rows))


@parametrize("gain", [1e-3, 1.0])
@parametrize("pool, share", [(torch.mean, 1), (torch.sum, 1 / 16)])
def test_a_branch_of_coordinates_begins_with_the_size_that_it_has(gain, pool, share):
    """As an equivariant network with a small last layer. The rate is that of a residual branch,
    whatever stands between the layer and the sum."""
    layers = {name: nn.Linear(1, 16) for name in ("a", "b")}
    model = Net(partial(coordinates, pool=pool), **layers, out=nn.Linear(16, 1))
    model.out.weight.data.mul_(gain)
    model.out.bias.data.mul_(gain)
    x = torch.randn(16, 3)
    for ours in unit_scale(model, batch=x), unit_scale(model):
        moved = ours(x) - x
        assert moved.norm() <= 2 * gain * x.norm() / share
        assert_same(ours.out.weight, model.out.weight)
        assert_same(ours.out.bias, model.out.bias)
        assert ours.out.weight.mup_scale == approx(share / 4, rel=0.7)
        assert not uu.report(ours).left_alone


READS = {
    "norm": lambda end: F.layer_norm(end, (64,)),
    "norm of a relu": lambda end: F.layer_norm(F.relu(end), (64,)),
    "layer": F.relu,
}
"""What is read of a branch beside the sum. Its scale is free where norms alone read it."""


@parametrize("name", READS)
def test_a_branch_has_its_weight_where_its_scale_is_free(name):
    def forward(m, x):
        end = F.scaled_dot_product_attention(x, x, m.down(x))
        return m.head(x + end) + m.other(READS[name](end))

    layers = {each: square() for each in ("down", "other", "head")}
    x = torch.randn(32, 8, 64)
    ours = unit_scale(Net(forward, **layers), batch=x)
    end = F.scaled_dot_product_attention(x, x, ours.down(x))
    octaves = math.log2(rms(end) / rms(x)) + 0.5
    is_free = name != "layer"
    assert (abs(octaves) < 0.2) == is_free == (not uu.report(ours).left_alone)


def test_a_bias_that_carries_information_is_kept():
    """As that of a spatial transformer beside a weight of zeros, and that of rare classes; not the
    noise of an initialization."""
    rare = square()
    nn.init.constant_(rare.bias, -4.6)
    last = nn.Linear(64, 6)
    nn.init.zeros_(last.weight)
    last.bias.data.copy_(torch.tensor([1.0, 0, 0, 0, 1, 0]))
    model = nn.Sequential(square(), rare, square(), last)
    ours = unit_scale(model, batch=torch.randn(128, 64))
    assert not ours[0].bias.any()
    assert_same(ours[1].bias, rare.bias)
    assert_same(ours[3].bias, last.bias)
    kept = {row.path for row in uu.report(ours) if "information" in row.why}
    assert kept == {"1", "3"}


def test_a_weight_that_is_read_in_parts_is_set_once():
    """As torch's attention splits its projection for a query that is not the key."""
    model = Net(
        lambda m, x: m.attend(m.token.expand(len(x), -1, -1), x, x)[0],
        attend=nn.MultiheadAttention(16, 2, batch_first=True),
    )
    model.token = nn.Parameter(torch.randn(1, 1, 16))
    ours = unit_scale(model, batch=torch.randn(4, 8, 16))
    assert rms(ours.attend.in_proj_weight) == approx(1 / 4, rel=1e-4)
    ours(torch.randn(4, 8, 16)).sum().backward()


def test_a_query_that_is_a_parameter_is_an_operand():
    """As a token that pools by attention: it has RMS 1, as what is computed has."""
    model = Net(
        lambda m, x: m.out(F.scaled_dot_product_attention(m.token, m.k(x), m.v(x))),
        k=nn.Linear(16, 16),
        v=nn.Linear(16, 16),
        out=nn.Linear(16, 4),
    )
    model.token = nn.Parameter(0.02 * torch.randn(1, 1, 16))
    ours = unit_scale(model, batch=torch.randn(4, 8, 16))
    assert rms(ours.token) == approx(1, rel=1e-4)
    assert ours.token.mup_scale == 1
    uu.optim.AdamW(ours.parameters()).step()


def test_the_bias_of_a_weight_that_keeps_its_values_is_kept():
    """Its layer computes what it did: the weight is read otherwise too."""
    model = Net(
        lambda m, x: m.b(m.a(x)) + m.a.weight.sum(),
        a=nn.Linear(8, 16),
        b=nn.Linear(16, 4),
    )
    ours = unit_scale(model, batch=torch.randn(32, 8))
    assert_same(ours.a.weight, model.a.weight)
    assert_same(ours.a.bias, model.a.bias)
    kept = {row.what for row in uu.report(ours) if row.done == "keeps its values"}
    assert kept == {"weight", "bias"}


def test_the_function_in_which_a_weight_is_read_is_named():
    """guided-diffusion checkpoints by a function of its own."""

    class Checkpoint(torch.autograd.Function):
        @staticmethod
        def forward(ctx, layer, x, weight):
            return layer(x)

    forward = lambda m, x: m.last(Checkpoint.apply(m.inner, x, m.inner.weight))  # noqa: E731
    model = Net(forward, inner=nn.Linear(8, 8, bias=False), last=nn.Linear(8, 4))
    (row,) = (
        row
        for row in uu.report(unit_scale(model, batch=torch.randn(4, 8)))
        if row.done == "keeps its values"
    )
    assert row.why.startswith("read inside of the autograd function Checkpoint")


def test_values_that_come_out_non_finite_are_an_error():
    model = linears(4, 4, 4)
    before = deepcopy(model.state_dict())
    with torch.no_grad():
        model[1].weight.fill_(math.inf)
    with refuses(r"unit_scale: 1.weight .*not finite"):
        unit_scale(model, batch=torch.randn(8, 4))
    assert_same(model[0].weight, before["0.weight"])


def test_parameters_share_few_learning_rates():
    """A step of torch's optimizers is as fast as its groups are few."""
    model, ids = GPT(layers=8, width=48), torch.randint(65, (4, 64))
    ours = unit_scale(model, batch=(ids, ids))
    (group,) = uu.optim.AdamW(ours.parameters()).param_groups
    assert len(set(group["mup_lr_scales"])) <= 12


def test_a_batch_or_a_model_without_numbers_is_an_error():
    model = linears(4, 4, 4)
    with refuses("output of Sequential has NaN"):
        unit_scale(model, batch=torch.full((8, 4), math.nan))
    with refuses(r"0.weight is on the meta device"):
        unit_scale(model.to("meta"), batch=torch.randn(8, 4))


def test_a_model_is_transformed_once():
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    part = nn.Sequential(unit_scale(model))
    for first in (unit_scale(model), unit_scale(model, batch=x), part):
        with refuses("the model is unit-scaled already"):
            unit_scale(first, batch=x)
