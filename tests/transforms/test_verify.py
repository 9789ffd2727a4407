"""`verify` reports what the model computes: each number against one computed by hand."""

import copy
import math
import warnings

import pytest
import torch
from torch import nn
from torch.func import grad, vmap
from torch.nn import functional as F

import fp8
import unit_scaling as uu
import unit_scaling.functional as U
from benchmarks.casts import Casts
from tests.shared import (
    Net,
    assert_same,
    filterwarnings,
    linears,
    pairs,
    parametrize,
    refuses,
    rms,
    seeded,
    warns,
)
from tests.transforms.models import KINDS, batch, checkpointed, gpt, loss_of
from unit_scaling.transforms import compile, simulate_fp8, track_scales, unit_scale

attention, verify = F.scaled_dot_product_attention, uu.verify


def found(result, path=""):
    """tensor -> rms of the rows of one module, without ambiguity."""
    rows = [row for row in result if row.path == path]
    names = [f"{row.call} {row.number} {row.tensor}" for row in rows]
    assert len(set(names)) == len(names)
    if len({(row.call, row.number) for row in rows}) == 1:
        return {row.tensor: row.rms for row in rows}
    return {name: row.rms for name, row in pairs(names, rows)}


def close(got, expected):
    """float64 sums of the same float32 values, in another order."""
    assert got == pytest.approx(expected, rel=1e-9)


def calls(function, weight):
    """A model of one function of its input and its weight."""
    return Net(lambda m, x: function(x, m.weight), weight=nn.Parameter(weight))


def square():
    return nn.Linear(64, 64)


PRODUCTS = {
    "linear": (F.linear, (6, 4), (3, 4)),
    "linear by name": (lambda x, w: F.linear(weight=w, input=x), (6, 4), (3, 4)),
    "operator": (lambda x, w: x @ w.T, (6, 4), (3, 4)),
    "addmm": (lambda x, w: torch.addmm(torch.ones(3), x, w), (6, 4), (4, 3)),
    "einsum": (lambda x, w: torch.einsum("ij,kj->ik", x, w), (6, 4), (3, 4)),
    "bmm": (lambda x, w: torch.bmm(x, w), (2, 3, 4), (2, 4, 5)),
    "conv1d": (lambda x, w: F.conv1d(x, w, padding=1), (2, 3, 8), (4, 3, 3)),
    "conv2d": (
        lambda x, w: F.conv2d(x, w, torch.ones(4), 2),
        (2, 3, 8, 8),
        (4, 3, 3, 3),
    ),
    "conv_transpose1d": (F.conv_transpose1d, (2, 3, 8), (3, 4, 3)),
    "unit-scaled": (U.linear, (6, 4), (3, 4)),
    "unit-scaled convolution": (U.conv1d, (2, 3, 8), (4, 3, 3)),
}


@parametrize("name", PRODUCTS)
def test_every_spelling_of_a_product(name):
    function, shape, weight_shape = PRODUCTS[name]
    x, weight = torch.randn(shape, requires_grad=True), 3 * torch.randn(weight_shape)
    model = calls(function, weight)
    target = torch.randn_like(model(x))
    result = verify(model, x, loss=lambda y: (y * target).sum())
    expected = {
        "input": rms(x),
        "weight": rms(weight),
        "gradient of output": rms(target),
    }
    close(found(result), expected)
    assert {row.kind for row in result} == {"activation", "weight", "gradient"}


def test_an_embedding_has_a_weight_alone():
    result = verify(nn.Embedding(10, 4, sparse=True), torch.tensor([[1, 2, 2]]))
    assert [(row.tensor, row.kind) for row in result] == [("weight", "weight")]


def attending(spelled):
    def forward(m, x):
        q, k, v = m.q(x), m.k(x), m.v(x)
        if spelled == "fused":
            return attention(q, k, v)
        scores = (q @ k.transpose(-2, -1)) / 32**0.5
        p = (
            scores.softmax(-1)
            if spelled == "by hand"
            else F.softmax(scores.float(), dim=-1)
        )
        return torch.matmul(F.dropout(p, 0.0), v)

    return Net(forward, **{name: nn.Linear(32, 32, bias=False) for name in "qkv"})


@parametrize("spelled", ["fused", "by hand", "with casts"])
def test_attention(spelled):
    """Probabilities have no row, however it is written, and what only makes queries and keys has a
    range of its own."""
    # No kernel of a CPU fuses attention of five dimensions.
    result = verify(attending(spelled), torch.randn(1, 1, 2, 8, 32))
    rows = [(row.number, row.tensor) for row in result if row.path == ""]
    if spelled == "fused":
        assert rows == [
            (0, name) for name in ("query", "key", "value", "gradient of output")
        ]
    else:
        last = [(0, "input"), (0, "other"), (0, "gradient of output")]
        assert rows == [*last, (1, "other"), (1, "gradient of output")]
    gradients = {
        row.path: row.kind for row in result if row.path and "gradient" in row.tensor
    }
    small = "query-key gradient"
    assert gradients == {"q": small, "k": small, "v": "gradient"}


def test_a_softmax_that_is_no_attention():
    """A router's, and one of an attention's output: neither computes a query or a key. The layer
    whose output is the query and the key does."""

    def forward(m, x):
        keys = m.keys(x)
        y = attention(keys, keys, x).softmax(-1)
        return F.softmax(m.gate(x), dim=-1) * (y @ y.transpose(-2, -1))[..., :4]

    model = Net(forward, gate=nn.Linear(8, 4), keys=nn.Linear(8, 8))
    result = verify(model, torch.randn(2, 4, 8, requires_grad=True))
    kinds = {(row.path, row.call, row.tensor): row.kind for row in result}
    small = {place for place, kind in kinds.items() if kind == "query-key gradient"}
    assert small == {("keys", "linear", "gradient of output")}
    judged = {place[:2] for place, kind in kinds.items() if kind == "gradient"}
    assert judged == {
        ("gate", "linear"),
        ("", "scaled_dot_product_attention"),
        ("", "matmul"),
    }


def test_what_is_measured_is_what_the_transformed_model_computes():
    """Weights are measured as they are cast."""
    model = unit_scale(gpt())
    result = verify(model, batch())
    for path in ("blocks.0.qkv", "blocks.1.down"):
        weight = model.get_parameter(f"{path}.weight")
        measured = found(result, path)["weight"]
        octaves = math.log2(rms(weight) / measured)
        assert octaves == pytest.approx(round(octaves), abs=1e-5)
        assert 0.7 < measured < 1.42


def test_compiled_and_tracked_models_are_measured_as_they_are():
    model = unit_scale(gpt())
    expected = verify(model, batch())
    for each in (compile(model), torch.compile(model), track_scales(model)):
        assert verify(each, batch()) == expected
    with fp8.autocast("unit"):
        assert verify(model, batch()) != expected
    assert verify(simulate_fp8(model), batch()) != expected


def test_a_transformed_part_of_a_plain_model():
    part = unit_scale(linears(64, 64, nn.GELU, 64))
    model = nn.Sequential(square(), part)
    x = torch.randn(64, 64)
    first, again = verify(model, x), verify(model, x)
    assert [row.path for row in first if row.tensor == "input"] == ["0", "1.0", "1.2"]
    assert first == again
    row = next(row for row in first if row.path == "1.0" and row.tensor == "input")
    assert row.rms * row.scale == pytest.approx(rms(model[0](x)), rel=1e-6)


def test_checkpoints_are_counted_once():
    model, x = checkpointed(), torch.randn(4, 8)
    for each in (model, unit_scale(model)):
        ours = found(verify(each, x), "layer")
        assert set(ours) == {"input", "weight", "gradient of output"}


def test_nothing_of_the_model_changes():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
    embedding = nn.Embedding(4, 8, max_norm=0.1)
    model[0].weight.grad = torch.full((8, 8), 3.0)
    calls = []
    model[0].weight.register_hook(lambda grad: calls.append(1))
    before = copy.deepcopy({**model.state_dict(), **embedding.state_dict()})
    x = torch.randn(4, 8, requires_grad=True)
    random = torch.get_rng_state()
    verify(model, x)
    verify(embedding, torch.tensor([1, 2]))
    assert_same(torch.get_rng_state(), random)
    assert x.grad is None
    assert not calls
    assert type(model[0]) is nn.Linear
    assert_same(model[0].weight.grad, torch.full((8, 8), 3.0))
    after = {**model.state_dict(), **embedding.state_dict()}
    assert_same(after, before)


def test_batches_and_losses():
    class Head(nn.Linear):
        def forward(self, x, how="tensor"):
            y = super().forward(x)
            loss = y.square().mean()
            return {"tensor": y, "loss": {"out": y, "loss": loss}, "pair": (y, loss)}[
                how
            ]

    model, x = Head(4, 4), torch.randn(4, 4)
    expected = verify(model, x, loss=lambda y: y.square().mean())
    assert verify(model, {"x": x, "how": "loss"}) == expected
    assert verify(model, (x, "pair")) == expected
    drawn = verify(model, [x])
    assert drawn == verify(model, x, seed=0) != verify(model, x, seed=1)
    wide = verify(nn.Linear(4, 256), torch.randn(256, 4))
    grad = found(wide)["gradient of output"]
    assert grad == pytest.approx(
        1, abs=5 * (0.5 / 2**16) ** 0.5
    )  # variance of an rms: 1/(2n)


def test_the_result_prints():
    result = verify(
        nn.Linear(4, 4), torch.randn(4, 4), loss=lambda y: y.sum() * math.inf
    )
    text = str(result)
    assert "(model)  linear" in text
    assert "outside" in text
    assert "gradient: 0 of 1 inside [0.25, 64]" in text.splitlines()


def test_what_is_refused():
    with refuses(r"needs an nn\.Module, got int", TypeError):
        verify(3, torch.ones(1))
    with refuses("requires a gradient"):
        verify(nn.Linear(4, 4).requires_grad_(False), torch.ones(4, 4))
    with refuses(r"one element, got a tensor of shape"):
        verify(nn.Linear(4, 4), torch.randn(2, 4), loss=lambda output: output)
    result = verify(nn.Linear(4, 4), torch.randn(4, 4))
    with refuses("choose one of 'activation', 'weight', 'gradient'"):
        result.share("bias")
    assert math.isnan(result.share("query-key gradient"))


def overwritten(layers=4):
    torch.manual_seed(0)
    model = nn.Sequential(*(uu.Linear(64, 64) for _ in range(layers)))
    for layer in model:
        nn.init.normal_(layer.weight, std=0.02)
    return model


WELL = ["every tensor is in the range of its kind"]


def test_a_diagnosis_begins_with_the_cause():
    """Weights before activations, which are small for that, and before gradients."""
    # It warns of nothing by itself.
    found = verify(overwritten(), torch.randn(64, 64))
    weights, activations, gradients = found.diagnosis
    assert weights.startswith(
        "4 of 4 weights have RMS 0.02 instead of 1, the first in 0 (linear)"
    )
    assert "reset_parameters" in weights
    assert activations.startswith(
        "activations shrink from the input of 1 (linear) on, RMS 0.0"
    )
    assert gradients.startswith(
        "gradients shrink from the gradient of output of 2 (linear) on"
    )
    assert str(found).endswith("\n".join(found.diagnosis))


def test_zeros_have_rows_and_do_not_count():
    """A head of zeros sends nothing to the layers in front of it, and gets nothing from a loss that
    is least there."""
    model, x = nn.Sequential(uu.Linear(64, 64), uu.Linear(64, 64)), torch.randn(256, 64)
    nn.init.zeros_(model[1].weight)
    result = verify(model, x)
    assert {row.path: row.rms == 0 for row in result if row.kind == "gradient"} == {
        "0": True,
        "1": False,
    }
    assert result.share("weight") == result.share("gradient") == 1
    assert "gradient: 1 of 1 inside [0.25, 64], 1 of zeros" in str(result).splitlines()
    assert result.diagnosis == WELL
    result = verify(model, x, loss=lambda y: y.square().sum())
    zeros = [row.tensor for row in result if row.rms == 0 and row.kind == "gradient"]
    assert zeros == ["gradient of output"] * 2
    assert math.isnan(result.share("gradient"))
    (found,) = result.diagnosis
    assert found.startswith("every gradient is zero: ")
    assert "gradient: 0 of 0 inside [0.25, 64], 2 of zeros" in str(result).splitlines()


def labelled():
    torch.manual_seed(0)
    return torch.randn(512, 64), torch.randint(64, (512,))


def test_a_diagnosis_of_the_loss_and_of_modules_that_are_well():
    x, labels = labelled()
    model = nn.Sequential(uu.Linear(64, 64), uu.GELU(), uu.LinearReadout(64, 64))
    (found,) = verify(model, x, loss=lambda y: F.cross_entropy(y, labels)).diagnosis
    assert found.startswith("the loss's gradient at the model's output has RMS 0.000")
    assert "U.cross_entropy" in found
    assert verify(model, x, loss=lambda y: U.cross_entropy(y, labels)).diagnosis == WELL
    assert verify(model, x).diagnosis == WELL


def test_a_transformed_model_is_well_under_any_loss():
    """It casts the gradient of its output at RMS 1 by what it measured at its first step."""
    x, labels = labelled()
    model = unit_scale(linears(64, 64, nn.GELU, 64))
    fresh = verify(model, x)
    F.cross_entropy(model(x), labels).backward()
    assert verify(model, x, loss=lambda y: F.cross_entropy(y, labels)).diagnosis == WELL
    assert verify(model, x) == fresh


@parametrize("factor", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_outside(factor):
    model = unit_scale(linears(8, 8, 8))
    result = verify(model, torch.randn(4, 8), loss=lambda y: factor * y.sum())
    assert {row.kind for row in result.outside} == {"gradient"}


# Scales


def spread(octaves, has_layer):
    """Two layers, with factors of some features between them: of one layer's output, or of a
    product without a layer."""

    def forward(m, x):
        y = factors * m.first(x)
        return m.last(y) if has_layer else y @ y.T

    factors = torch.ones(64)
    factors[:2] = 2.0**octaves
    return Net(forward, first=square(), last=square())


X64 = torch.randn(64, 64, generator=seeded(0))


@parametrize("has_layer", [True, False])
@parametrize("octaves", [0, 6, 20, 60])
def test_an_operand_is_judged_by_its_spread_at_its_scale(octaves, has_layer):
    result = verify(unit_scale(spread(octaves, has_layer), batch=X64), X64)
    path = "last" if has_layer else ""
    judged = [row for row in result if row.path == path and row.kind == "activation"]
    assert len(judged) == 2 - has_layer
    assert {row.inside for row in judged} == {octaves < 10}
    assert all((row in result.outside) == (octaves > 10) for row in judged)
    if octaves > 10:
        assert f"the input of {path or 'the model'} (" in result.diagnosis[0]
        assert "97% of its values" in result.diagnosis[0]
        assert "outside, loses" in str(result)


@parametrize("size", [2.0**-40, 2.0**-12, 2.0**12, 2.0**40])
def test_the_size_of_an_operand_does_not_matter_at_a_scale(size):
    """That of a model without scales does."""

    def forward(m, x):
        y = size * m.a(x)
        return m.b((y @ y.T) @ x)

    model = Net(forward, a=square(), b=square())
    result = verify(unit_scale(model, batch=X64), X64)
    assert result.share("activation") == result.share("gradient") == 1
    assert result.diagnosis == WELL
    assert "activation: 6 of 6 inside at their scales" in str(result)
    with fp8.autocast("unit"):
        unit = verify(unit_scale(model, batch=X64), X64)
    assert unit.share("activation") < 1
    assert verify(model, X64).share("activation") < 1


def test_a_tensor_is_judged_at_the_scale_that_it_is_cast_at():
    plain = linears(64, 64, nn.GELU, 8)
    x, targets = X64, torch.randint(8, (64,))

    def loss(logits):
        return F.cross_entropy(logits, targets)

    model = fp8.convert(unit_scale(plain, batch=x), "static")
    exponents = fp8.calibrate(model, x, loss)
    result = verify(model, x, loss=loss)
    assert result.diagnosis == WELL
    names = {"input": "input", "weight": "weight", "gradient of output": "grad"}
    scales = {f"{row.path}.{names[row.tensor]}": math.log2(row.scale) for row in result}
    assert scales == exponents
    with warns("become zero", fp8.warnings.ScaleWarning):
        small = verify(model, x, loss=lambda y: 1e-9 * loss(y))
    assert (small.share("activation"), small.share("gradient")) == (1, 0)
    simulated = simulate_fp8(unit_scale(plain, batch=x))
    loss(simulated(x)).backward()
    assert verify(simulated, x, loss=loss).diagnosis == WELL
    with warns("become zero", fp8.warnings.ScaleWarning):
        assert verify(simulated, 1e-6 * x, loss=loss).share("activation") < 1


@filterwarnings("ignore:.*stays in high precision")
@pytest.mark.sampled(3)
@parametrize("name", KINDS)
def test_it_judges_as_the_casts_do(name):
    """Of models of every kind, as they are, and with values that no scale holds."""
    kind = KINDS[name]
    x = kind.batch()
    x = x.float() if x.is_floating_point() else x
    model = simulate_fp8(unit_scale(kind.make().float()))
    loss_of(model, x).backward()
    casts = Casts(model)
    with casts.sampled:
        loss_of(model, x).backward()
    result = verify(model, x, loss=lambda y: loss_of(lambda _: y, x))
    assert casts.share == 1
    assert not result.outside
    layers = [
        path for path, layer in model.named_modules() if hasattr(layer, "fp8_settings")
    ]
    for path in layers[:1]:  # values that are far from the scale of their cast
        scales = model.get_submodule(path)._buffers
        scales[next(name for name in scales if name.endswith("input"))].mul_(2.0**20)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fp8.warnings.ScaleWarning)
        outside = verify(model, x).outside
    assert {row.path for row in outside if row.tensor == "input"} >= {*layers[:1]}


# Transforms of torch.func, recurrent layers, kernels


X = torch.linspace(-2, 2, 64 * 32).reshape(64, 32).sin()
APPLIED = {
    "straight": lambda f, x: f(x),
    "mapped": lambda f, x: vmap(f)(x),
    "differentiated": lambda f, x: grad(lambda z: f(z).square().sum())(x),
}


def mapping(how):
    """Two layers, and what is done with the function that they are."""
    torch.manual_seed(0)
    inner = lambda m: lambda x: m.second(torch.tanh(m.first(x)))  # noqa: E731
    forward = lambda m, x: APPLIED[how](inner(m), x)  # noqa: E731
    return Net(forward, first=nn.Linear(32, 16), second=nn.Linear(16, 8))


def test_calls_inside_of_vmap_are_measured_as_outside():
    """Over all that it maps, forward and backward; a note says so."""
    straight, mapped = (verify(mapping(how), X) for how in ("straight", "mapped"))
    for one, other in pairs(straight, mapped):
        assert (one.path, one.call) == (other.path, other.call)
        assert one.tensor == other.tensor
        assert one.rms == pytest.approx(other.rms, rel=1e-5)
    assert not straight.notes
    assert "linear in first runs under a transform of torch.func" in mapped.notes[0]


def test_calls_inside_of_grad_are_measured_by_the_outer_gradient():
    rows = verify(unit_scale(mapping("differentiated")), X)
    assert {row.path for row in rows} == {"first", "second"}
    assert all(row.rms > 0 for row in rows)
    assert rows.notes


@parametrize("how", ["mapped", "differentiated"])
def test_track_scales_measures_inside_of_transforms(how):
    model = track_scales(mapping(how))
    model(X).sum().backward()
    metrics = [node.meta.get("metrics") for node in model.scales_graph().nodes]
    assert all(m.fwd.rms > 0 for m in metrics if m is not None)


@parametrize("layer", [nn.LSTM(4, 4), uu.LSTM(4, 4), uu.GRU(4, 4)])
def test_recurrent_layers_are_measured_from_outside(layer):
    """Input and weights; not states, which begin at zero, nor biases. A note says so."""
    result = verify(layer, torch.randn(3, 2, 4), loss=lambda out: out[0].sum())
    tensors = ["input", "weight", "weight", "gradient of output"]
    assert [row.tensor for row in result] == tensors
    (note,) = result.notes
    assert note.endswith(
        "in the model itself: its steps are one call, not measured inside"
    )


@parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_transformed_recurrent_layer_of_two_directions(kind):
    """Of which torch multiplies nine operands or more in one call."""
    plain, x = kind(16, 16, num_layers=2, bidirectional=True), torch.randn(6, 4, 16)
    model = unit_scale(plain, batch=x)
    result = verify(model, x, loss=lambda out: out[0].square().mean())
    assert not result.outside
    assert sum(row.tensor == "weight" for row in result) == 8


NOTED = {
    "cdist": (
        lambda m, x: torch.cdist(m.a(x), m.a.weight),
        "is not measured: the distance",
    ),
    "conv_tbc": (
        lambda m, x: torch.conv_tbc(
            m.a(x)[:, None], torch.ones(1, 8, 8), torch.zeros(8)
        ),
        "is not measured: call conv1d",
    ),
    "einsum": (
        lambda m, x: U.einsum("ij,jk,kl->il", m.a(x), m.a.weight, (m.a.weight,)),
        ": its steps are one call, not measured inside",
    ),
}


@parametrize("name", NOTED)
def test_what_cannot_be_seen_through_is_noted(name):
    forward, why = NOTED[name]
    (note,) = verify(
        Net(forward, a=nn.Linear(8, 8, bias=False)), torch.randn(4, 8)
    ).notes
    assert note.startswith(name)
    assert f"in the model itself{'' if why[0] == ':' else ' '}{why}" in note


def test_an_einsum_of_three_operands_is_two_products():
    model = Net(lambda _, x: torch.einsum("ij,jk,kl->il", x, x, x))
    result = verify(model, torch.randn(4, 4, requires_grad=True))
    numbers = [row.number for row in result if row.kind == "activation"]
    assert numbers == [0, 0, 1, 1]
    assert not result.notes


def test_products_that_compute_a_weight_are_none_of_the_models():
    """The power iteration of a spectral norm multiplies the weight, which is then divided by it."""
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(32, 32))
    result = verify(unit_scale(layer), torch.randn(64, 32))
    assert {row.call for row in result} == {"linear"}


def test_products_of_constants_have_no_row():
    """The angles of rotary embeddings are none of the model's values, nor is a mask that has only
    the dtype of one."""

    def forward(m, x):
        angles = torch.einsum("i,j->ij", torch.arange(8.0), torch.arange(4.0))
        y = m.a(x)
        lowest = torch.full((8, 8), -3e38).type_as(y)
        return y * angles.cos() + (torch.eye(8) @ lowest).clamp(0)[:, :4]

    result = verify(Net(forward, a=nn.Linear(4, 4, bias=False)), torch.randn(8, 4))
    assert {row.call for row in result} == {"linear"}
