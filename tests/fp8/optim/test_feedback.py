"""Error feedback of Adam against its formula in float64, and what it is for."""

import copy
import io

import pytest
import torch
from torch import Tensor, nn

from fp8.optim import Adam, AdamW, Muon
from fp8.tensors.scaled_tensor import scaled

FLOAT32 = {"first_moment": "float32", "second_moment": "float32"}


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weights(kind: str) -> list[nn.Parameter]:
    """Of one size that is stepped alone and one that is stepped with others."""
    both = [randn(96, 64), randn(5, 7, seed=1), randn(11, seed=2)]
    if kind == "scaled":
        return [nn.Parameter(scaled(w, "e4m3", dtype=torch.bfloat16)) for w in both]
    return [nn.Parameter(w.to(getattr(torch, kind))) for w in both]


def step(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], seed: int) -> None:
    for i, p in enumerate(parameters):
        p.grad = randn(*p.shape, seed=10 * seed + i).to(p.dtype)
    optimizer.step()


def wide(x: Tensor) -> Tensor:
    return x.detach().to(torch.float32).double()


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("kind", ["bfloat16", "float16", "scaled"])
def test_what_rounding_loses_is_added_to_the_momentum(kind, stochastic):
    """Algorithm 3 of arXiv:2601.22101, three steps, in float64 from the states before each."""
    lr, (b1, b2), eps, decay = 1e-3, (0.9, 0.99), 1e-8, 0.1
    parameters = weights(kind)
    shared = {"lr": lr, "betas": (b1, b2), "eps": eps, "weight_decay": decay}
    how = {"error_feedback": True, "stochastic_weights": stochastic, **FLOAT32}
    optimizer = AdamW(parameters, **shared, **how)
    for t in (1, 2, 3):
        before = [
            (wide(p), *(optimizer.state[p].get(n) for n in ("exp_avg", "exp_avg_sq")))
            for p in parameters
        ]
        before = [(w, *(None if x is None else x.double() for x in s)) for w, *s in before]
        step(optimizer, parameters, t)
        for p, (w, m, v) in zip(parameters, before, strict=True):
            g, zero = wide(p.grad), torch.zeros_like(w)
            m = b1 * (zero if m is None else m) + (1 - b1) * g
            v = b2 * (zero if v is None else v) + (1 - b2) * g.square()
            root = (v / (1 - b2**t)).sqrt() + eps
            exact = (1 - lr * decay) * w - lr * m / (1 - b1**t) / root
            factor = (1 - b1**t) / lr * (1 - 1 / b1) * root
            wanted = m + factor * (exact - wide(p))
            state = optimizer.state[p]
            # The error is the difference of float32 numbers of the size of the weight.
            bound = 1e-5 * wanted.abs() + factor.abs() * w.abs().clamp(min=1e-3) * 2.0**-21
            assert ((state["exp_avg"].double() - wanted).abs() <= bound).all()
            assert (state["exp_avg"].double() - m).abs().max() > 1e-3
            torch.testing.assert_close(state["exp_avg_sq"].double(), v, rtol=1e-5, atol=1e-12)


def test_weights_in_float32_lose_nothing():
    plain, fed = weights("float32"), weights("float32")
    optimizers = [AdamW(plain, **FLOAT32), AdamW(fed, error_feedback=True, **FLOAT32)]
    for seed in range(3):
        for optimizer, own in zip(optimizers, (plain, fed), strict=True):
            step(optimizer, own, seed)
    assert all(torch.equal(a, b) for a, b in zip(plain, fed, strict=True))


def descended(steps: int, **how: bool) -> Tensor:
    """How far bfloat16 weights of 1.9 come in steps of 2e-4 of one direction."""
    weight = nn.Parameter(torch.full((64,), 1.9, dtype=torch.bfloat16))
    begin = wide(weight)
    optimizer = AdamW([weight], lr=2e-4, weight_decay=0.0, **FLOAT32, **how)
    for _ in range(steps):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    return begin - wide(weight)


def test_steps_below_the_spacing_of_weights_take_effect():
    """The spacing is 2**-7. The first moment grows by 1 - beta1 with each lost step until a step is
    half of it, and a weight is at most a spacing away from its rounded one: the lag is at most
    2**-8 / (1 - beta1) + 2**-7. Without feedback the first step is the only one."""
    steps = 800
    lag = 2.0**-8 / (1 - 0.9) + 2.0**-7
    fed, alone = descended(steps, error_feedback=True), descended(steps)
    assert (alone <= 2.0**-7).all()
    assert ((fed - steps * 2e-4).abs() <= lag).all()
    both = descended(steps, error_feedback=True, stochastic_weights=True)
    assert abs(float(both.mean()) - steps * 2e-4) <= 2.0**-7


def test_a_regression_ends_near_that_in_float32():
    """The root mean square of what is left exceeds that of float32 weights by the lag of
    `test_steps_below_the_spacing_of_weights_take_effect` at most; rounded ones do not move."""

    def left(dtype: torch.dtype, **how: bool) -> float:
        target = 1 + torch.rand(40, generator=torch.Generator().manual_seed(0))
        weight = nn.Parameter(1 + torch.rand(40, generator=torch.Generator().manual_seed(1)))
        weight = nn.Parameter(weight.detach().to(dtype))
        optimizer = AdamW([weight], lr=2e-3, weight_decay=0.0, **FLOAT32, **how)
        for _ in range(600):
            weight.grad = (weight.detach().float() - target).to(dtype)
            optimizer.step()
        return float((wide(weight) - target).square().mean().sqrt())

    lag = 2.0**-8 / (1 - 0.9) + 2.0**-7
    exact, alone = left(torch.float32), left(torch.bfloat16)
    assert left(torch.bfloat16, error_feedback=True) <= exact + lag < alone / 2


@pytest.mark.parametrize("first", ["float32", "bfloat16", "e4m3_block"])
def test_a_state_is_saved_and_goes_on(first):
    how = {"first_moment": first, "second_moment": "float32", "error_feedback": True}
    parameters = weights("bfloat16")
    optimizer = AdamW(parameters, **how)
    for seed in range(3):
        step(optimizer, parameters, seed)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    others = copy.deepcopy(parameters)
    again = AdamW(others, **how)
    again.load_state_dict(torch.load(file, weights_only=True))
    for seed in range(3, 6):
        step(optimizer, parameters, seed)
        step(again, others, seed)
    assert all(torch.equal(a, b) for a, b in zip(parameters, others, strict=True))


def test_l2_decay_and_a_rate_of_zero():
    parameters = weights("bfloat16")
    before = [wide(p) for p in parameters]
    optimizer = Adam(parameters, lr=0.0, weight_decay=0.1, error_feedback=True, **FLOAT32)
    step(optimizer, parameters, 0)
    assert all(torch.equal(wide(p), w) for p, w in zip(parameters, before, strict=True))
    assert all(optimizer.state[p]["exp_avg"].isfinite().all() for p in parameters)


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ({}, ValueError, "needs first_moment 'float32', 'bfloat16', 'e4m3_block'.* got 'e4m3'"),
        (FLOAT32 | {"master_weights": "float32"}, ValueError, "needs master_weights=None"),
        (FLOAT32 | {"betas": (0.0, 0.9)}, ValueError, r"betas\[0\] above 0"),
        (FLOAT32 | {"error_feedback": 1}, TypeError, "error_feedback must be"),
    ],
)
def test_what_it_does_not_go_with(how, error, message):
    with pytest.raises(error, match=message):
        AdamW(weights("bfloat16"), **{"error_feedback": True, **how})


def test_muon_refuses_it():
    group = {"params": [weights("bfloat16")[0]], "algorithm": "muon", "error_feedback": True}
    with pytest.raises(ValueError, match="error_feedback is not supported by algorithm 'muon'"):
        Muon([group])
