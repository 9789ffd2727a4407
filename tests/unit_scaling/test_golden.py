"""The numbers of the library this one replaces, wherever they were right."""

import json
import math
from functools import partial
from pathlib import Path

import pytest
import torch

import unit_scaling as uu
import unit_scaling.functional as U
from tests.shared import parametrize, proves, refuses
from unit_scaling.constraints import CONSTRAINTS
from unit_scaling.scale import scale_bwd

RECORDED = json.loads(Path(__file__).with_name("golden.json").read_text())
GOLDEN, GOLDEN_MODULES = RECORDED["functions"], RECORDED["modules"]


def wave(*shape, seed=1):
    """RMS about 1, and the same everywhere: no random number generator involved."""
    steps = torch.arange(1, math.prod(shape) + 1, dtype=torch.float64)
    return (torch.sin(steps**2 * 0.37 * seed + seed) * math.sqrt(2)).reshape(shape)


X, Y = wave(6, 8), wave(6, 8, seed=9)
WEIGHT, BIAS = wave(4, 8, seed=2), wave(4, seed=3)
NORM_WEIGHT, NORM_BIAS = wave(8, seed=4), wave(8, seed=5)
SIGNAL, KERNEL, KERNEL_BIAS = wave(2, 4, 9), wave(6, 4, 3, seed=2), wave(6, seed=3)
TARGET = torch.tensor([1, 3, 0, 7, 2, 2])


def qkv(queries, keys):
    k, v = (wave(2, 3, keys, 4, seed=seed) for seed in (2, 3))
    return wave(2, 3, queries, 4), k, v


def fewer_uses(x):
    """The recorded gradient counts 3 uses of each of the 9 inputs of the kernel of 3.

    There are only 7 outputs, so that the mean is 7/3, which the factor here is for.
    """
    return scale_bwd(x, (7 / 9) ** 0.5)


def constrained(name):
    mult, strided = {"mult": 1.5}, {"stride": 2, "padding": 1}
    cases = {
        "linear": ({}, X, WEIGHT, BIAS),
        "linear_readout": ({}, X, WEIGHT, BIAS),
        "gelu": (mult, X),
        "silu": (mult, X),
        "softmax": ({"dim": -1, **mult}, X),
        "add": ({}, X, Y),
        "matmul": ({}, X, wave(8, 3, seed=9)),
        "conv1d": (strided, SIGNAL, KERNEL, KERNEL_BIAS),
    }
    return {
        f"{op}/{name}": (partial(getattr(U, op), constraint=name, **settings), *inputs)
        for op, (settings, *inputs) in cases.items()
    }


CASES = {
    "matmul_batched": (
        partial(U.matmul, constraint=None),
        wave(2, 3, 4, 5),
        wave(2, 3, 5, 6, seed=2),
    ),
    "linear_power": (lambda *a: U.linear(*a, None, (0.25, 0.5, 0.75)), X, WEIGHT, BIAS),
    "gelu_tanh": (lambda x: U.gelu(x, approximate="tanh"), X),
    "silu_glu": (lambda x, y: U.silu_glu(x, y, mult=2.0), X, Y),
    "add_broadcast": (partial(U.add, constraint=None), X, wave(8, seed=9)),
    "add_broadcast2": (partial(U.add, constraint=None), wave(6, 1), wave(8, seed=9)),
    "add_scalar": (lambda x: U.add(x, 3.0), X),
    "scalar_add": (lambda x: U.add(3.0, x, constraint=None), X),
    "layer_norm": (lambda x, *a: U.layer_norm(x, (8,), *a), X, NORM_WEIGHT, NORM_BIAS),
    "rms_norm": (lambda x, w: U.rms_norm(x, (8,), w), X, NORM_WEIGHT),
    "rms_norm_none": (lambda x: U.rms_norm(x, (8,)), X),
    "embedding": (
        lambda w: U.embedding(torch.tensor([[1, 2, 0], [1, 3, 1]]), w),
        wave(5, 4),
    ),
    "residual_split": (lambda x: torch.cat(U.residual_split(x, tau=0.3)), X),
    "residual_add": (lambda x, y: U.residual_add(x, y, tau=0.3), X, Y),
    "residual_apply": (lambda x: U.residual_apply(torch.sin, x, tau=0.3), X),
    "sdpa_cross": (U.scaled_dot_product_attention, *qkv(4, 6)),
    "sdpa_mask": (
        # 0.3.5 has the scale of all keys whatever the mask is: ours, if the length is said
        lambda *a: U.scaled_dot_product_attention(
            *a, torch.ones(4, 6).bool().tril(), context_length=6
        ),
        *qkv(4, 6),
    ),
    "sdpa_1token": (U.scaled_dot_product_attention, *qkv(1, 1)),
    "cross_entropy_mult": (lambda x: U.cross_entropy(x, TARGET, mult=2.0), X),
    "cross_entropy_soft": (
        lambda x: U.cross_entropy(x, torch.softmax(x.detach() * 2, -1)),
        X,
    ),
    "cross_entropy_1d": (lambda x: U.cross_entropy(x, torch.tensor(2)), wave(8)),
    "conv1d_groups": (
        lambda x, *a: U.conv1d(
            fewer_uses(x),
            *a,
            stride=1,
            padding=1,
            dilation=2,
            groups=2,
            constraint=None,
        ),
        SIGNAL,
        wave(6, 2, 3, seed=2),
        KERNEL_BIAS,
    ),
    "conv1d_power": (
        lambda *a: U.conv1d(*a, 2, 1, scale_power=(0.25, 0.5, 0.75), constraint=None),
        SIGNAL,
        KERNEL,
        KERNEL_BIAS,
    ),
    "conv1d_unbatched": (
        lambda x, *a: U.conv1d(fewer_uses(x), *a, constraint=None),
        wave(4, 9),
        KERNEL,
        KERNEL_BIAS,
    ),
}
for constraint in (None, *CONSTRAINTS):
    CASES |= constrained(constraint)
for causal in (False, True):
    for tokens in (2, 5):
        attend = partial(U.scaled_dot_product_attention, is_causal=causal, mult=1.5)
        CASES[f"sdpa/causal={causal}/T={tokens}"] = (attend, *qkv(tokens, tokens))
for reduction in ("mean", "sum"):
    r = {"reduction": reduction}
    CASES[f"cross_entropy/{reduction}"] = (
        partial(U.cross_entropy, target=TARGET, **r),
        X,
    )
    CASES[f"mse_loss/{reduction}"] = (partial(U.mse_loss, **r), X, Y)


def first_two(*tensors):
    return [value for t in tensors for value in t.flatten()[:2].tolist()]


@proves("unit-scaling", "names, parameters and defaults")
@parametrize("name", GOLDEN)
def test_function(name):
    f, *inputs = CASES[name]
    inputs = [x.clone().requires_grad_() for x in inputs]
    output = f(*inputs)
    output.backward(wave(*output.shape, seed=7))
    # Recorded to 7 decimals; attention on a CPU is accurate to float32's roundings or better.
    expected = pytest.approx(GOLDEN[name], abs=5e-7, rel=1e-6)
    assert first_two(output, *(x.grad for x in inputs)) == expected


def filled(module):
    for i, parameter in enumerate(module.parameters()):
        parameter.data = wave(*parameter.shape, seed=i + 2)
    return module


MODULES = {
    "MLP": lambda: uu.MLP(8),
    "MHSA": lambda: uu.MHSA(8, 2, is_causal=True),
    "Layer": lambda: uu.TransformerLayer(8, 2, 0.3, 0.4, is_causal=True),
    "Stack": lambda: uu.TransformerStack(2, hidden_size=8, heads=2, is_causal=True),
}


@proves("unit-scaling", "the unit-scaled MLP")
@parametrize("name", GOLDEN_MODULES)
def test_module(name):
    values, gradients = GOLDEN_MODULES[name]
    module, x = filled(MODULES[name]()), wave(2, 5, 8).requires_grad_()
    output = module(x)
    output.backward(wave(*output.shape, seed=7))
    # Recorded in float32 in part: a few of its roundings.
    approx = partial(pytest.approx, abs=2e-6, rel=2e-6)
    assert first_two(output, x.grad) == approx(values)
    first = [p.grad.flatten()[0].item() for p in module.parameters()]
    assert first == approx(gradients)


def test_decoder():
    decoder = filled(uu.TransformerDecoder(8, 11, 2, 2))
    tokens = torch.tensor([[1, 2, 3, 10, 0]])
    logits = [0.2460658978, 0.4080837777, 0.1026317514]
    assert decoder(tokens).flatten()[:3].tolist() == pytest.approx(logits, rel=1e-6)
    loss = decoder.loss(tokens)
    loss.backward()
    assert loss.item() == pytest.approx(2.347455025, rel=1e-6)
    gradients = [p.grad.flatten()[0].item() for p in decoder.parameters()]
    expected = [0.0, -0.0849622, -0.2428682, -0.0792156, -0.2100402, 0.1138894]
    expected += [-0.0367247, -0.2287894, 0.6405853, 0.0073628, -0.462762, -2.0806919]
    assert gradients == pytest.approx(expected, abs=2e-6)


def test_residual_scaling_rule():
    rule = uu.transformer_residual_scaling_rule
    taus = [rule()(i, 8) for i in range(8)]
    assert taus == pytest.approx([(4 + i) ** -0.5 for i in range(8)], rel=1e-12)
    taus = [rule(0.5, 2.0)(i, 8) for i in range(8)]
    expected = [0.316227766, 0.150755672, 0.298142397, 0.142857143]
    expected += [0.282842712, 0.136082763, 0.269679945, 0.130188911]
    assert taus == pytest.approx(expected, rel=1e-8)
    with refuses("even number of branches, got 3"):
        rule()(0, 3)
    for index in (-1, 8):
        with refuses(f"one of 8 branches, from 0 on, got {index}"):
            rule()(index, 8)


@parametrize("name", ["residual_mult", "residual_attn_ratio"])
@parametrize("value", [-1.0, float("nan")])
def test_a_negative_weight_of_branches_is_refused(name, value):
    with refuses(f"{name} is at least 0, got {value}"):
        uu.transformer_residual_scaling_rule(**{name: value})


def test_same_initial_values():
    """The same draws from the generator: the standard normal weight, and nothing else."""
    for module, shape in ((uu.Linear(3, 2), (2, 3)), (uu.Embedding(3, 2), (3, 2))):
        torch.manual_seed(0)
        module.reset_parameters()
        torch.manual_seed(0)
        assert torch.equal(module.weight, torch.randn(shape))
