"""`fp8.cached_weights`: weights that are cast once for several micro-batches."""

import pickle
from collections import Counter
from copy import deepcopy

import pytest
import torch
from torch import nn

import fp8
from fp8.kernels import product
from fp8.layers import cached_weights as module
from tests.shared import (
    assert_same,
    in_one_graph,
    normal,
    parametrize,
    pickled,
    refuses,
    settle,
)

pytestmark = pytest.mark.native

RECIPES = "unit tensor row row_gw_hp static".split()
LAYERS, MICRO, STEPS = 2, 3, 2
X = normal(16, 32)


def make(recipe="tensor"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 16, bias=False))
    model = fp8.convert(model, recipe, backend="native")
    if recipe == "static":
        fp8.calibrate(model, X)
    return model


@pytest.fixture
def casts(monkeypatch):
    """The casts of weights: cached ones, and those of products."""
    counts = Counter()
    both, store = module._layouts, product.store

    def counted_both(*args):
        counts["cached"] += 1
        return both(*args)

    def counted(x, *args, **kwargs):
        counts["products"] += isinstance(x, nn.Parameter)
        return store(x, *args, **kwargs)

    monkeypatch.setattr(module, "_layouts", counted_both)
    monkeypatch.setattr(product, "store", counted)
    return counts


def train(model, call=None, steps=STEPS):
    """The outputs and gradients of all micro-batches, and the weights at the end."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    results = []
    for step in range(steps):
        for i in range(MICRO):
            y = (call or model)(normal(16, 32, seed=10 * step + i))
            y.square().mean().backward()
            results += [y.detach(), *(p.grad.clone() for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return results + [p.detach().clone() for p in model.parameters()]


def assert_equal(got, want):
    assert len(got) == len(want)
    assert_same(got, want)


@parametrize("recipe", RECIPES)
def test_micro_batches_cast_once_and_equal_to_the_bit(recipe, casts):
    want = train(make(recipe))
    assert casts["cached"] == 0
    model = make(recipe)
    casts.clear()
    with fp8.cached_weights(model):
        assert_equal(train(model), want)
    # When the block opens, and after each step; of products that cast the weight twice, no more.
    assert casts == {"cached": LAYERS * (1 + STEPS), "products": 0}


@parametrize("recipe, backend", [("unit", "inductor"), ("static", "aot_eager")])
def test_compiled(recipe, backend, monkeypatch):
    """A graph reads the casts; after the first step they are cast by compiled code, too."""
    plain, model, casts = make(recipe)[:1], make(recipe)[:1], []
    settle(plain)
    want = train(plain, in_one_graph(plain, backend))
    compile, cast = module._compiled, module.WeightCast.cast
    monkeypatch.setattr(
        module, "_compiled", lambda *args: casts.append("compiled") or compile(*args)
    )
    monkeypatch.setattr(
        module.WeightCast, "cast", lambda *args: casts.append("all") or cast(*args)
    )
    compiled = in_one_graph(model, backend)
    settle(model)
    with fp8.cached_weights(model):
        compiled(X)
        with torch._dynamo.config.patch(error_on_recompile=True):
            assert_equal(train(model, compiled), want)
    assert Counter(casts) == {"all": 1 + STEPS, "compiled": STEPS}


def test_changes_that_torch_counts_are_cast_in_eager_mode():
    model = make()
    state = {name: 3 * t for name, t in model.state_dict().items()}
    with fp8.cached_weights(model):
        for change in (
            lambda: [p.mul_(1.3) for p in model.parameters()],
            lambda: model.load_state_dict(state),
            lambda: setattr(model[0].weight, "data", -model[0].weight.data),
            lambda: setattr(model[2], "weight", nn.Parameter(-model[2].weight)),
        ):
            with torch.no_grad():
                change()
            y = model(X)
            assert_same(y, deepcopy(model)(X))


@parametrize("ends", ["step", "block"])
@parametrize("compiled", [False, True])
def test_a_stale_cast_is_an_error(compiled, ends):
    """A write through .data, and any write between calls of a graph."""
    model = make()
    call = in_one_graph(model) if compiled else model

    def run():
        with fp8.cached_weights(model):
            call(X).sum().backward()
            if compiled:
                with torch.no_grad():
                    model[2].weight[3, 5] *= 2
            else:
                model[2].weight.data[3, 5] *= 2
            call(X).sum().backward()
            if ends == "step":
                torch.optim.SGD(model.parameters(), 0.1).step()

    with refuses(r"'2' was changed inside", RuntimeError):
        run()
    assert not hasattr(model[2].weight, "fp8_cache")


@parametrize("late", [fp8.Policy("row", rules=[("2", None, None)]), "static", None])
@parametrize("recipe", ["tensor", None])
def test_a_switch_inside_of_a_block_computes_as_without_one(recipe, late):
    """Casts of the recipe before are not read, and layers that were not cast are."""
    policy = fp8.Policy(recipe, rules=[("0", None, "tensor")], switch=[(0.5, late)])

    def run(model):
        results = train(model, steps=1)
        fp8.advance(model, 0.6)
        results += train(model)
        fp8.advance(model, 0.1)
        return results + train(model, steps=1)

    wanted = run(make(policy))
    model = make(policy)
    with fp8.cached_weights(model):
        assert_equal(run(model), wanted)


def test_copies_carry_no_cast():
    model = make()
    size = len(pickle.dumps(model.state_dict()))
    with fp8.cached_weights(model):
        model(X)
        copies = [deepcopy(model), pickled(model)]
        assert len(pickle.dumps(model.state_dict())) == size
        for other in copies:
            with torch.no_grad():
                other[0].weight.mul_(2)
            assert not torch.equal(other(X), model(X))
            assert all(
                getattr(p, "fp8_cache", None) is None for p in other.parameters()
            )
    assert not any(hasattr(p, "fp8_cache") for p in model.parameters())


def test_what_is_not_cached():
    with refuses("cached_weights needs", TypeError), fp8.cached_weights(3):  # type: ignore[arg-type]
        pass
    for model in (
        nn.Linear(16, 16),
        fp8.convert(nn.Linear(16, 16), "tensor", backend="simulate"),
        fp8.convert(nn.Linear(16, 16), "delayed", backend="native"),
        fp8.convert(nn.Linear(16, 16), "static", backend="native"),  # not set yet
    ):
        with refuses("no layer of Linear"), fp8.cached_weights(model):
            pass


def test_other_casts_are_those_of_the_products():
    """A block with another recipe inside, and a nested block of cached weights."""
    model = make()
    with fp8.override(model, ("*", None, "row")):
        want = model(X)
    with fp8.cached_weights(model):
        with fp8.override(model, ("*", None, "row")):
            assert_same(model(X), want)
        with refuses("no layer"), fp8.cached_weights(model):
            pass
