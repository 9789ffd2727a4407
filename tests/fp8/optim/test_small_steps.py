"""Steps that are small beside weights and moments in few bits take effect, and where they are lost,
as in torch, the documentation says so: for every encoding, dtype and layout."""

import torch
from torch import nn

import fp8
from fp8.optim import AdamW
from fp8.optim.encodings import ENCODINGS, MASTERS, MOMENTS, decode
from fp8.optim.state import MASTER, format_of, has, read
from tests.shared import assert_close, pairs, parametrize, warns

from .test_optim import FLOAT32

LR, STEPS = 1e-4, 40


@parametrize("moment", MOMENTS)
def test_moments_that_begin_at_zero_grow(moment):
    """500 steps of one gradient, with magnitudes within a factor of 16: float32 moves by 500 LR.

    A moment rounded to nearest stands still once its change, (1 - beta) of what is missing, is less
    than half a unit, u = 2**-(mantissa bits + 1): of the first one at most u / (1 - beta1) of the
    rest is missing. On its way a change of 1/2 to 1 and of 1 to 3/2 units becomes a unit, so that a
    second moment is between 2/3 and 2 times the exact one. One rounded stochastically is right in
    the mean: its deviation is about 0.7 units, and that of the mean of 256 roots of it less than 5
    times 0.7 / 2 / 16, a quarter of a unit."""
    size, steps = 2.0 ** -torch.linspace(0, 4, 256), 500
    weights = {name: nn.Parameter(torch.zeros(256)) for name in MOMENTS[moment]}
    groups = [{"params": [weight], moment: name} for name, weight in weights.items()]
    optimizer = AdamW(groups, LR, weight_decay=0.0, min_size=0, **FLOAT32)
    for _ in range(steps):
        for weight in weights.values():
            weight.grad = size.clone()
        optimizer.step()
    for name, weight in weights.items():
        moved = -weight.detach() / (steps * LR)
        unit = 2.0 ** -ENCODINGS[name].format.mantissa_bits
        if moment == "first_moment":
            low, high = 1 / (1 + unit / 2 / (1 - 0.9)), 1 + unit / 2
        elif not ENCODINGS[name].rounds_stochastically(0.999):
            low, high = 2**-0.5, 1.5**0.5
        else:
            low, high, moved = 1 - unit / 4, 1 + unit / 4, moved.mean()
        assert low - 1e-3 <= moved.min(), name
        assert moved.max() <= high + 1e-3, name


WEIGHTS = {
    "float32": lambda w: w,
    "bfloat16": lambda w: w.bfloat16(),
    "float16": lambda w: w.half(),
    "strided": lambda w: w.bfloat16().repeat_interleave(2, 1)[:, ::2],
    "channels last": lambda w: (
        w.half().view(8, 16, 8, 4).contiguous(memory_format=torch.channels_last)
    ),
    "of a level": lambda w: fp8.scaled(w, "fp16"),
    "e4m3": lambda w: fp8.scaled(w, "e4m3"),
    "e5m2": lambda w: fp8.scaled(w.t(), "e5m2"),
}


def trained(**settings):
    """Kind of weights -> (before, after some steps down): masters where there are any."""
    weights = [
        nn.Parameter(make(torch.full((64, 64), 1.01))) for make in WEIGHTS.values()
    ]
    before = [weight.detach().to(torch.float32).clone() for weight in weights]
    optimizer = AdamW(weights, LR, weight_decay=0.0, **FLOAT32, **settings)
    for _ in range(STEPS):
        for weight in weights:
            weight.grad = torch.ones(weight.shape, dtype=weight.dtype)
        optimizer.step()
    after = []
    for weight in weights:
        state, values = optimizer.state[weight], weight.detach().to(torch.float32)
        if has(state, MASTER):
            values = decode(read(state, MASTER)).view(weight.shape)
        after.append(values)
    return dict(pairs(WEIGHTS, pairs(before, after)))


def spacing(kind):
    """Of the numbers of the format beside 1.01."""
    return 2.0 ** -format_of(WEIGHTS[kind](torch.ones(64, 64))).mantissa_bits


@parametrize(
    "settings",
    [
        {"stochastic_weights": True, "min_size": 0},
        {"stochastic_weights": True, "min_size": 1 << 20},
        *(
            {"master_weights": name, "stochastic_weights": name != "float32"}
            for name in MASTERS
        ),
    ],
)
def test_each_step_is_taken_in_the_mean(settings):
    """A step of LR is one of a spacing s with the probability LR / s, and so its variance at most
    LR s; 4096 weights take each step of their own. A master in float16 has the spacing 2**-10, one
    in float32 is not rounded."""
    master = settings.get("master_weights")
    for kind, (before, after) in trained(**settings).items():
        of_master = 2.0**-10 * settings["stochastic_weights"]
        gap, rounding = (of_master, 1e-5) if master else (spacing(kind), 1e-6)
        deviation = (STEPS * LR * gap / before.numel()) ** 0.5
        moved = float((before - after).double().mean())
        assert abs(moved - STEPS * LR) <= 5 * deviation + rounding, kind
        assert master or kind == "float32" or after.unique().numel() > 1


@parametrize(
    "dtype, settings",
    [(torch.float32, {}), (torch.bfloat16, {"master_weights": "float32"})],
)
def test_where_nothing_is_rounded_stochastically_is_a_warning(dtype, settings):
    weight = nn.Parameter(torch.ones(64, 64, dtype=dtype))
    optimizer = AdamW([weight], stochastic_weights=True, **settings)
    optimizer.step()
    weight.grad = torch.ones_like(weight)
    message = "stochastic_weights=True rounds no weight"
    with warns(message, fp8.warnings.OptimizerWarning):
        optimizer.step()
    optimizer.step()  # once


@parametrize("large", [1.9e19, torch.finfo(torch.float32).max])
def test_a_large_gradient_is_stepped_as_by_torch(large):
    """Beside torch's AdamW in float64, whose second moments do not overflow: steps depend on the
    ratios of gradients, and after so large a one all others are as zeros."""
    ours = nn.Parameter(torch.zeros(300))
    theirs = nn.Parameter(torch.zeros(300).double())
    optimizers = AdamW([ours], 0.1, **FLOAT32), torch.optim.AdamW([theirs], 0.1)
    for step in range(20):
        grad = torch.randn(300)
        grad[:100] = grad[:100].sign() * large if step == 3 else grad[:100]
        grad[100:200] = large
        ours.grad, theirs.grad = grad, grad.double()
        for optimizer in optimizers:
            optimizer.step()
    assert optimizers[0].skipped_steps == 0
    assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5)
