"""The straight-through pair, and compiled code giving the bits of eager code."""

import torch

from fp8 import FORMATS, Format
from fp8.formats.quantize import quantize, quantize_backward, quantize_forward
from tests.fp8.oracles import assert_rounded, random_patterns
from tests.shared import assert_close, assert_same, filterwarnings, normal, parametrize

OPTIONS = [
    {},
    {"overflow": "nonfinite"},
    {"scale": 0.5},
    {"rounding": "stochastic", "seed": (1, 2)},
    {
        "rounding": "stochastic",
        "seed": torch.tensor(3),
        "scale": torch.full((1, 8), 2.0),
    },
]

EQUAL = {"rtol": 0, "atol": 0, "equal_nan": True}

# torch's compiler does what torch deprecates.
TORCH_DEPRECATES = filterwarnings("ignore::DeprecationWarning:torch")

CUSTOM = Format(
    name="custom", exponent_bits=3, mantissa_bits=4, bias=3, max=28.0, infinity=True
)


def tensors(*shape):
    return (normal(*shape) * 300).requires_grad_(), normal(*shape, seed=1) * 300


CASES = [(format, options) for format in ("e5m2", CUSTOM) for options in OPTIONS]
CASES += [(format, {}) for format in FORMATS.values()]


@parametrize("format, options", CASES)
def test_one_direction_is_quantized_and_the_other_passes(format, options):
    x, grad = tensors(5, 8)
    y = quantize_forward(x, format, **options)
    assert_close(y, quantize(x, format, **options), **EQUAL)
    assert_same(torch.autograd.grad(y, x, grad)[0], grad)
    y = quantize_backward(x, format, **options)
    assert_same(y, x)
    (got,) = torch.autograd.grad(y, x, grad)
    assert_close(got, quantize(grad, format, **options), **EQUAL)


def test_quantize_is_not_differentiable():
    assert not quantize(tensors(4)[0], "e4m3").requires_grad


def test_second_derivatives_pass_straight_through():
    x, grad = tensors(6)
    y = quantize_backward(x, "e5m2") ** 2
    (first,) = torch.autograd.grad(y, x, grad, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert_same(first, quantize(2 * x * grad, "e5m2"))
    assert_same(second, quantize(2 * grad, "e5m2"))


def test_a_seed_drawn_for_the_backward_pass_is_drawn_in_the_forward_pass():
    x, grad = tensors(1000)
    grads = []
    for noise in range(2):
        torch.manual_seed(1)
        y = quantize_backward(x, "e5m2", rounding="stochastic")
        torch.manual_seed(noise)
        grads += torch.autograd.grad(y, x, grad)
    assert_same(*grads)


def step(x, half, seed):
    """Every kernel and both autograd functions in one graph."""
    y = quantize_forward(x, "e4m3", overflow="nonfinite")
    y = quantize_backward(y, "e5m2", rounding="stochastic", seed=(seed, 1))
    return torch.stack(
        [
            y,
            quantize_forward(x, "e4m3", rounding="stochastic", seed=(7, seed)),
            quantize_forward(x, "fp16", rounding="stochastic", seed=8, scale=3.0),
            quantize(x, CUSTOM),
            quantize(x, "bf16"),
            quantize(half, "e4m3fnuz").float(),
            quantize(x, "e2m1", scale=x.new_full((37, 1), 0.7)),
        ]
    )


@TORCH_DEPRECATES
def test_compiled_code_gives_the_bits_of_eager_code():
    compiled = torch.compile(step, fullgraph=True)
    data = random_patterns(37 * 41, 1).view(37, 41)
    data[:19] = normal(19, 41, seed=2) * 100
    # An input: a cast to bfloat16 inside the graph is one that inductor may skip.
    half = data.bfloat16()
    grad = normal(7, 37, 41, seed=3)
    for seed in (torch.tensor(5), torch.tensor(-6)):
        x, z = (data.clone().requires_grad_() for _ in range(2))
        want, got = step(x, half, seed), compiled(z, half, seed)
        assert_rounded(got.detach(), want.detach(), want.detach())
        want.backward(grad)
        got.backward(grad)
        assert_same(z.grad, x.grad)
