"""What users do with weights and gradients: at each level as with a plain model of the same
numbers."""

from copy import deepcopy

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fp8
from fp8.casts.scaled_tensor import dequantized
from tests.shared import Net, normal, pairs, parametrize

DECAY = 0.999


def forward(m, x):
    x = m.inner(x)
    x = x + m.attention(x, x, x, need_weights=False)[0]
    return m.outer(x) @ m.inner.weight.t() + sum(m.outer.weight.chunk(2))[0]


def made():
    inner, outer = nn.Linear(16, 16), nn.Linear(16, 16, bias=False)
    attention = nn.MultiheadAttention(16, 2, batch_first=True)
    return Net(forward, inner=inner, attention=attention, outer=outer)


def inputs(seed=0):
    return normal(2, 4, 16, seed=seed)


def backward(model, seed=0):
    model(inputs(seed)).square().mean().backward()


def other_weights(model):
    """Other values for all parameters, plain."""
    return [normal(*p.shape, seed=i) for i, p in enumerate(model.parameters())]


def moved(model):
    """A step that is small beside the weights, as another process or optimizer makes it."""
    with torch.no_grad():
        for p, x in pairs(model.parameters(), other_weights(model)):
            p.add_(x, alpha=1e-3)
    return model


# --- averages of weights ------------------------------------------------------------------------


AVERAGES = {
    "in place": lambda e, v: e.mul_(DECAY).add_(v, alpha=1 - DECAY),
    "target network": lambda e, v: e.data.copy_((1 - DECAY) * v.data + DECAY * e.data),
}


def averaged(name):
    """An average beside the training of a model, made by deepcopy."""

    def run(model):
        ema = deepcopy(model)
        with torch.no_grad():
            for _ in range(50):
                states = ema.state_dict().values(), moved(model).state_dict().values()
                for e, v in pairs(*states):
                    AVERAGES[name](e, v)
        return ema

    run.__name__ = name
    return run


def averaged_model(model):
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for _ in range(50):
        average.update_parameters(moved(model))
    return average.module


# --- writing to weights -------------------------------------------------------------------------


def swapped(model):
    backup = [p.data for p in model.parameters()]
    for p, shadow in pairs(model.parameters(), other_weights(model)):
        p.data = shadow
    within = model(inputs())
    for p, b in pairs(model.parameters(), backup):
        p.data = b
    return within, model


def parts_written(model):
    with torch.no_grad():
        model.inner.weight[0].zero_()
        model.inner.weight[model.inner.weight > 0.1] = 0.25
        model.inner.weight.t()[3:5].mul_(3)
        model.outer.weight.data.clamp_(-0.01, 0.01).fill_diagonal_(1.5)
        nn.init.xavier_uniform_(model.attention.in_proj_weight[:16])
    return model


def inferred(model):
    model.eval()
    with torch.inference_mode():
        result = (
            model(inputs()),
            model.inner.weight.t()[2:5].clone(),
            model.outer.weight.view(-1)[3],
        )
        model.outer.weight.mul_(0.5).add_(1e-3)
    backward(model)
    return result, model


# --- gradients ----------------------------------------------------------------------------------


def gradients_changed(model):
    for seed in range(4):
        backward(model, seed)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        nn.utils.clip_grad_value_(model.parameters(), 1e-2)
        for p in model.parameters():
            p.grad.data.mul_(0.9)
            p.grad += 1e-4 * p.detach()
            p.grad = p.grad * 0.5
    return [p.grad for p in model.parameters()]


def stepped_by_torch(model):
    """An optimizer that knows nothing of levels, with steps that fp16 rounds away."""
    for kind in (torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop):
        theirs = kind(model.parameters(), lr=1e-6)
        for seed in range(20):
            theirs.zero_grad()
            for p, x in pairs(model.parameters(), other_weights(model)):
                p.grad = x + seed
            theirs.step()
    return model


EXACT = (averaged_model, swapped, parts_written, inferred, stepped_by_torch)
TOLERANCES = dict.fromkeys((*map(averaged, AVERAGES), *EXACT), 2.0**-20)
TOLERANCES[gradients_changed] = 2.0**-4
"""Idiom -> the share of a result that may be wrong: none but by sums in another order, or by the
rounding of a gradient to e4m3."""


def at_level(level):
    model = made()
    optimizer = torch.optim.Adam(model.parameters())
    return fp8.initialize(model, optimizer, level, recipe=None)[0]


def plain_of(model):
    values = {k: dequantized(v).clone() for k, v in model.state_dict().items()}
    other = made()
    other.load_state_dict(values)
    return other


def results(idiom, model):
    torch.manual_seed(2)
    return list(leaves(idiom(model)))


def leaves(found):
    if isinstance(found, nn.Module):
        found = found.state_dict().values()
    if isinstance(found, torch.Tensor):
        yield dequantized(found.detach(), torch.float32)
    else:
        for each in found:
            yield from leaves(each)


@parametrize("level", ["O2", "O3"])  # O1 has the weights of O2
@parametrize("idiom", TOLERANCES)
def test_as_with_a_plain_model(idiom, level):
    model = at_level(level)
    expected = results(idiom, plain_of(model))
    found = results(idiom, model)
    assert len(found) == len(expected)
    for one, other in pairs(found, expected):
        assert (one - other).norm() <= TOLERANCES[idiom] * other.norm()
