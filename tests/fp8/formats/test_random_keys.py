"""Keys of casts without a seed: what torch draws does not depend on them, and they repeat whenever
the state of torch's generator does."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fp8
from fp8 import Cast, Recipe
from fp8.casts.rotation import rotation_signs
from fp8.formats.quantize import quantize_forward
from fp8.formats.random_bits import drawn_key
from tests.shared import assert_same, filterwarnings, one_in, parametrize, sampled

CPU = torch.device("cpu")

X = torch.linspace(-3, 3, 64)

NUMBERS = {
    "rand": lambda: torch.rand(3),
    "randn of one": lambda: torch.randn(
        1
    ),  # torch keeps the second of a pair for the next call
    "randn of many": lambda: torch.randn(100),
    "double": lambda: torch.randn(3, dtype=torch.float64),
    "randint": lambda: torch.randint(2**63 - 1, (3,)),
    "randperm": lambda: torch.randperm(20),
    "bernoulli": lambda: torch.bernoulli(torch.full((30,), 0.5)),
    "dropout": lambda: F.dropout(torch.ones(700)),
    "exponential": lambda: torch.empty(5).exponential_(),
    "multinomial": lambda: torch.multinomial(torch.ones(9), 4),
}
"""Random numbers of torch."""

ROUNDED = Cast(format="e2m1", scaling="tensor", rounding="stochastic")
HOW = dataclasses.replace(ROUNDED, hadamard=16, signs="random")
RANDOM = Recipe(name="random", input=HOW, weight=HOW, grad=HOW)
"""Every choice of every cast is random, in the forward pass and in the backward pass."""

RECIPES = {name: name for name in ("nvfp4", "quartet2", "tetrajet2")}
RECIPES["random"] = RANDOM


def quantized():
    return fp8.quantize(X, "e2m1", rounding="stochastic")


def drawn(count):
    return [int(drawn_key(CPU)) for _ in range(count)]


@parametrize("before", [0, 1, 2, 622, 623, 624, 625, 1248])
@parametrize("name", NUMBERS)
def test_torch_draws_the_same_numbers_wherever_keys_are_drawn(name, before):
    """From each position in the 624 words of a state, and across several of them."""
    found = []
    for casts in (0, 1, 3):
        torch.manual_seed(before)
        torch.rand(before)
        numbers = []
        for _ in range(40):
            drawn(casts)
            numbers.append(NUMBERS[name]())
        found.append(torch.cat([*numbers, torch.rand(700)]))
    assert_same(found[0], found[1])
    assert_same(found[0], found[2])
    assert torch.initial_seed() == before


def test_keys_differ():
    """Also those drawn after other numbers, and those of other seeds."""
    keys = []
    for seed in (0, 1, 2**31 - 1, 2**31, -1):  # of a seed, torch reads 32 bits
        torch.manual_seed(seed)
        for _ in range(50):
            keys += drawn(20)
            torch.rand(31)
    assert len(set(keys)) == len(keys)


@parametrize("number", NUMBERS.values(), ids=list(NUMBERS))
def test_what_restores_the_generator_restores_the_draws(number):
    torch.manual_seed(3)
    first = [quantized(), number(), quantized(), quantized()]
    assert not torch.equal(first[2], first[3])
    torch.manual_seed(3)
    assert_same([quantized(), number(), quantized()], first[:3])
    state = torch.get_rng_state()
    with torch.random.fork_rng():
        quantized()
        torch.manual_seed(3)
        assert_same(quantized(), first[0])
    assert_same(quantized(), first[3])
    torch.set_rng_state(state)
    assert_same(quantized(), first[3])


@pytest.mark.vmap
@filterwarnings("ignore:There is a performance drop")  # quantize works in place
@parametrize("randomness", ["error", "different"])
def test_under_vmap_the_samples_share_their_bits_or_are_refused(randomness):
    """As torch refuses a number that all samples share, unless asked for it."""
    x = X.expand(4, 64)

    def cast(x):
        return fp8.quantize(x, "e2m1", rounding="stochastic")

    with pytest.raises(RuntimeError, match="vmap"):
        torch.func.vmap(cast, randomness=randomness)(x)
    same = torch.func.vmap(cast, randomness="same")(x)
    assert_same(same, same[:1].expand(4, 64))


def test_signs_are_fair_and_of_a_key_each():
    like = torch.ones(3, 16)
    signs = torch.stack([rotation_signs(HOW, like) for _ in range(4000)])
    assert set(signs.unique().tolist()) == {-1.0, 1.0}
    assert (signs.sum(0).abs() <= 5 * 4000**0.5).all()
    assert len({tuple(row) for row in signs.tolist()}) > 3500  # of 2**16


# Models


class Net(nn.Module):
    """Dropout before, between and after layers; returns what it drops too."""

    def __init__(self, count):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(count))

    def forward(self, x):
        masks = []
        for layer in self.layers:
            mask = F.dropout(torch.ones_like(x), 0.4)
            x = torch.tanh(layer(x * mask))
            masks.append(mask)
        return x, [*masks, F.dropout(torch.ones_like(x))]


def masks_of(recipe, compiled):
    torch.compiler.reset()
    torch.manual_seed(0)
    net, x = Net(1 if compiled else 3), torch.randn(8, 32)
    if recipe is not None:
        fp8.convert(net, recipe, backend="simulate")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    run = torch.compile(net, fullgraph=True) if compiled else net
    torch.manual_seed(1)
    seen = []
    for _ in range(3):
        y, masks = run(x)
        y.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen += [mask.clone() for mask in masks]
    return [*seen, torch.rand(9)]


@parametrize("recipe", RECIPES.values(), ids=list(RECIPES))
def test_dropout_masks_are_those_of_the_model_without_casts(recipe):
    """In each step of a training: a backward pass draws keys, too."""
    assert_same(masks_of(recipe, False), masks_of(None, False))


@sampled(2)
@parametrize("recipe", [Recipe(name="rounded", input=ROUNDED, grad=ROUNDED), RANDOM])
def test_dropout_masks_are_those_of_the_compiled_model_without_casts(recipe):
    """Rotations take the compiler a minute."""
    assert_same(masks_of(recipe, True), masks_of(None, True))


def test_compiled_code_draws_anew_repeats_under_a_seed_and_equals_eager_code():
    def two(x):
        first = fp8.quantize(x, "e2m1", rounding="stochastic")
        return first, fp8.quantize(x, "e2m1", rounding="stochastic")

    run = torch.compile(two, fullgraph=True)
    torch.manual_seed(1)
    calls = [run(X) for _ in range(3)]
    torch.manual_seed(1)
    for call in calls:
        assert_same(run(X), call)
    torch.manual_seed(1)
    assert sorted(y.tolist() for y in two(X)) == sorted(y.tolist() for y in calls[0])
    assert len({tuple(y.tolist()) for call in calls for y in call}) == 6


@parametrize("backend", [None, "aot_eager", one_in(2, "inductor")])
@parametrize("reentrant", [False, True])
def test_a_checkpoint_recomputes_with_the_same_bits(backend, reentrant):
    """The gradient of y * y / 2 is the y that is recomputed; the second segment draws other bits
    between the first one and its recomputation."""
    x = X.clone().requires_grad_()

    def segment(x):
        y = quantize_forward(x, "e2m1", rounding="stochastic")
        return y * y / 2, y.detach()

    def two(x):
        return [
            t for _ in range(2) for t in checkpoint(segment, x, use_reentrant=reentrant)
        ]

    run = two if backend is None else torch.compile(two, backend=backend)
    for _ in range(3):
        first, y, second, z = run(x)
        (grad,) = grads(first.sum() + 64 * second.sum(), x)
        assert_same(grad, y + 64 * z)
        assert not torch.equal(y, z)


def grads(loss, *inputs):
    """By ``backward``, which a reentrant checkpoint needs."""
    for x in inputs:
        x.grad = None
    loss.backward()
    return [x.grad for x in inputs]
