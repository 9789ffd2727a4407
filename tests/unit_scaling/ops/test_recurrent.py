"""Recurrent layers: torch's own, with weights that make them the same function, as the oracle."""

import numpy as np
import pytest
import torch
from torch import nn

import fp8
import unit_scaling as uu
from tests.shared import assert_close, in_one_graph, parametrize, refuses, rms
from unit_scaling.ops import recurrent
from unit_scaling.rules.table import OPS
from unit_scaling.transforms import unit_scale

KINDS = {  # -> arguments, gates, the factor of the hidden state
    "LSTM": ({}, 4, recurrent.LSTM_FACTOR),
    "GRU": ({}, 3, recurrent.GRU_FACTOR),
    "RNN": ({}, 1, recurrent.TANH_FACTOR),
    "RNN relu": ({"nonlinearity": "relu"}, 1, recurrent.RELU_FACTOR),
}
FORMS = {
    "plain": {},
    "no_bias": {"bias": False},
    "deep": {"num_layers": 2, "batch_first": True},
    "both_ways": {"num_layers": 2, "bidirectional": True},
}
each_kind = parametrize("kind", KINDS)


def make(kind, *sizes, **settings):
    return getattr(uu, kind.split()[0])(*sizes, **KINDS[kind][0], **settings)


@torch.no_grad()
def oracle(ours, kind):
    """torch's module in float64. Its hidden state is ours over the factor, all else is the same."""
    arguments, gates, factor = KINDS[kind]
    settings = {
        k: getattr(ours, k) for k in "num_layers bias batch_first bidirectional".split()
    }
    plain_class = getattr(nn, kind.split()[0])
    sizes = (ours.input_size, ours.hidden_size)
    plain = plain_class(*sizes, **settings, **arguments, dtype=torch.float64)
    plain.load_state_dict(ours.state_dict())
    share = (1 + 1 / gates) ** -0.5
    for name, p in plain.named_parameters():
        first = "_l0" in name
        if "_ih" in name:
            width = ours.input_size if first else plain.weight_ih_l1.shape[1]
            p *= (
                width**-0.5
                * share
                * (factor if name.startswith("weight") and not first else 1)
            )
        else:
            p *= (gates * ours.hidden_size) ** -0.5 * share
            p *= factor if name.startswith("weight") else 1
            if (
                kind == "GRU"
            ):  # the candidate reads reset * product, at unit scale again
                p[2 * ours.hidden_size :] *= 0.293379036**-0.5
    return plain


def randomized(module):
    """With biases that are not zero."""
    with torch.no_grad():
        for p in module.parameters():
            p.normal_()
    return module


@each_kind
@parametrize("form", FORMS)
def test_is_torchs_function(kind, form):
    ours = randomized(make(kind, 6, 5, **FORMS[form], dtype=torch.float64))
    plain, factor = oracle(ours, kind), KINDS[kind][2]
    x = torch.randn(3, 7, 6, dtype=torch.float64, requires_grad=True)
    batch = 3 if ours.batch_first else 7
    layers = ours.num_layers * (1 + ours.bidirectional)
    state = torch.randn(layers, batch, 5, dtype=torch.float64)
    if kind == "LSTM":
        y, (h, c) = ours(x, (state * factor, state))
        expected, (last, cell) = plain(x, (state, state))
        assert_close(c, cell)
    else:
        y, h = ours(x, state * factor)
        expected, last = plain(x, state)
    assert_close((y, h), (expected * factor, last * factor))
    g = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, x, g)
    (dx_plain,) = torch.autograd.grad(expected, x, g * factor)
    if form == "both_ways" or not kind.startswith("RNN"):
        assert_close(dx, dx_plain)


@each_kind
def test_gradients_of_parameters_are_torchs_up_to_the_rule(kind):
    ours = randomized(make(kind, 6, 5, dtype=torch.float64))
    plain, factor = oracle(ours, kind), KINDS[kind][2]
    x = torch.randn(4, 7, 6, dtype=torch.float64)
    y, g = ours(x)[0], torch.randn(4, 7, 5, dtype=torch.float64)
    y.backward(g)
    plain(x)[0].backward(g * factor)
    parallel = torch.nn.functional.cosine_similarity
    for name, p in ours.named_parameters():
        # Of one factor in the oracle.
        rows = 5 if kind != "GRU" or "_hh" not in name else 2
        a, b = (q.grad.flatten() for q in (p, plain.get_parameter(name)))
        head = a.numel() // p.shape[0] * 5 * rows if rows == 2 else a.numel()
        assert parallel(a[:head], b[:head], dim=0).item() == pytest.approx(
            1, abs=1e-9
        ), name


@each_kind
def test_scales_at_initialisation(kind):
    """RMS within [1/2, 2], the gradient of the first input no larger than that of the last ones.

    The rule is for stationary states of independent gates.
    """
    module = make(kind, 128, 128)
    x = torch.randn(60, 16, 128, requires_grad=True)
    y = module(x)[0]
    y.backward(torch.randn_like(y))
    tensors = {"output": y[5:], "first": x.grad[0], "last": x.grad[-5:]}
    tensors |= {name: p.grad for name, p in module.named_parameters()}
    values = {name: rms(t) for name, t in tensors.items()}
    assert all(1 / 2 < value < 2 for value in values.values()), values


def test_constants():
    """The second moments that the factors are made of, by Gauss-Hermite quadrature."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(100)
    weights /= weights.sum()
    sigmoid = (weights / (1 + np.exp(-nodes)) ** 2).sum()
    tanh = (weights * np.tanh(nodes) ** 2).sum()
    held = sigmoid * tanh / (1 - sigmoid)
    of_cell = (weights * np.tanh(held**0.5 * nodes) ** 2).sum()
    assert pytest.approx(tanh**-0.5, rel=1e-6) == recurrent.TANH_FACTOR
    assert pytest.approx((sigmoid * of_cell) ** -0.5, rel=1e-6) == recurrent.LSTM_FACTOR
    assert pytest.approx(held**-0.5, rel=1e-6) == recurrent.GRU_FACTOR


@each_kind
def test_one_sequence_and_the_transform(kind):
    """unit_scale gives torch's layer the weights with which it is the row: up to the size of its
    hidden state."""
    ours = make(kind, 6, 5)
    x = torch.randn(4, 6)
    assert_close(ours(x)[0], ours(x[:, None])[0].squeeze(1))
    if kind == "GRU":
        return  # whose row has its candidate at unit scale again
    plain = getattr(nn, kind.split()[0])(6, 5, **KINDS[kind][0])
    with torch.no_grad():
        for p in plain.parameters():  # already at unit scale, biases zero
            p.copy_(p / p.square().mean().sqrt() if p.dim() > 1 else p * 0)
    ours.load_state_dict(plain.state_dict())
    model = unit_scale(plain, batch=x[:, None])
    assert_close(KINDS[kind][2] * model(x[:, None])[0], ours(x[:, None])[0])
    assert not uu.report(model).left_alone


def test_dropout_is_between_layers_in_training():
    module, x = uu.LSTM(6, 5, num_layers=2, dropout=0.5), torch.randn(3, 4, 6)
    assert not torch.equal(module(x)[0], module(x)[0])
    module.eval()
    assert torch.equal(module(x)[0], module(x)[0])


def test_what_has_no_unit_scaled_form_is_refused_by_name():
    with refuses("'proj_size'", TypeError):
        uu.LSTM(6, 5, proj_size=3)
    x = torch.randn(3, 4, 6)
    weights = nn.LSTM(6, 5, proj_size=3).all_weights[0]
    with refuses("LSTM with proj_size", NotImplementedError):
        OPS["lstm"].call((x, (x, x), weights, True), {}, func=torch.lstm)
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([3, 2, 1, 1]))
    with refuses("packed sequence", NotImplementedError):
        uu.GRU(6, 5)(packed)
    for layer in (nn.GRU(6, 5), nn.LSTM(6, 5, proj_size=3)):
        assert unit_scale(layer)(packed)[0].data.isfinite().all()
    with refuses("2D or 3D"):
        uu.GRU(6, 5)(torch.randn(6))


@parametrize("kind", ["LSTM", "GRU"])
def test_compiled_and_in_low_precision(kind):
    module, x = make(kind, 6, 5), torch.randn(3, 4, 6)
    with torch._dynamo.config.patch(allow_rnn=True):  # torch's compiler asks for that
        compiled = in_one_graph(module)
        assert_close(compiled(x)[0], module(x)[0])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = module(x)[0]
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert all(p.grad.isfinite().all() for p in module.parameters())
    assert module.bfloat16()(x.bfloat16())[0].dtype == torch.bfloat16


def test_products_under_fp8():
    """e4m3 has three bits: an operand is off by 0.036 in RMS, a product of two by 0.05, and the
    steps pass on less than they add: twice that is a wide margin."""
    module, x = make("LSTM", 64, 64), torch.randn(8, 16, 64)
    with fp8.autocast("unit"):
        low = module(x)[0]
    assert 0.01 < (low - module(x)[0]).norm() / low.norm() < 0.1
