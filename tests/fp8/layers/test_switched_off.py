"""`fp8.autocast(enabled=False)` around converted layers: they run in high precision."""

from copy import deepcopy

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fp8
from tests.fp8.compare import outcome
from tests.shared import (
    Net,
    assert_same,
    filterwarnings,
    parametrize,
    randn,
    refuses,
    same,
    warns,
)

OFF = fp8.autocast(enabled=False)
REFUSED = refuses(r"outside of fp8\.autocast\(enabled=False\)", RuntimeError)


def forward(m, x):
    x = x + m.attention(x, x, x, need_weights=False)[0]
    return m.conv(m.second(F.gelu(m.first(x))))


def both(recipe="mxfp4"):
    """A model with layers of one product and of several, and a converted copy."""
    plain = Net(
        forward,
        attention=nn.MultiheadAttention(16, 2, batch_first=True),
        first=nn.Linear(16, 32),
        second=nn.Linear(32, 16),
        conv=nn.Conv1d(8, 8, 1),
    )
    return plain, fp8.convert(deepcopy(plain), recipe)


def batch():
    return randn(3, 8, 16)


def results(model, call=None):
    x = batch()
    run = model if call is None else call
    return outcome(lambda: run(x), [x, *model.parameters()])


def within(block, call):
    def run(x):
        with block:
            return call(x)

    return run


@parametrize("recipe", ["mxfp4", "static", "delayed"])
@filterwarnings("ignore::fp8.warnings.RecipeWarning")
def test_it_is_the_plain_model(recipe):
    plain, model = both(recipe)
    expected = results(plain)
    cast = results(model)
    state = deepcopy(model.state_dict())
    assert same(results(model, within(OFF, model)), expected)
    assert_same(model.state_dict(), state)
    assert not same(cast, expected)
    with OFF, torch.no_grad():
        assert_same(model.eval()(batch()), expected[0])


def test_the_innermost_block_decides():
    plain, model = both()
    cast, expected = results(model), results(plain)
    inner = within(fp8.autocast("tensor"), model)  # of products outside of layers
    assert same(results(model, within(OFF, inner)), cast)
    outer = within(fp8.autocast("tensor"), within(OFF, model))
    assert same(results(model, outer), expected)
    for block in (fp8.autocast(fp8.Policy(None)), fp8.autocast(fp8.Policy("bf16"))):
        assert same(results(model, within(block, model)), cast)
    assert same(results(model, OFF(model.forward)), expected)


def test_an_override_inside_warns_that_it_has_no_effect():
    plain, model = both()
    said = warns("no effect inside of fp8.autocast", fp8.warnings.RecipeWarning)
    with OFF, said, fp8.override(model, ("first", None, "tensor")):
        assert same(results(model), results(plain))


WAYS = {
    "contexts": {"use_reentrant": False, "context_fn": fp8.checkpoint_contexts},
    "not reentrant": {"use_reentrant": False},
    "reentrant": {"use_reentrant": True},
}


@parametrize("way", WAYS)
def test_checkpoints(way):
    """Recomputed in high precision too, or refused by name if they recompute."""
    plain, model = both()
    expected, how = grads(plain, plain), WAYS[way]
    inside = lambda x: checkpoint(within(OFF, model), x, **how)  # noqa: E731
    assert same(grads(model, inside), expected)
    inner = lambda x: checkpoint(model, x, **how)  # noqa: E731
    around = within(OFF, inner)
    if way == "contexts":
        assert same(grads(model, around), expected)
    else:
        with REFUSED:
            around(batch())
    if way == "not reentrant":
        with torch.no_grad():
            assert_same(around(batch()), plain(batch()))
    y = checkpoint(model, batch(), **how)
    with OFF, REFUSED:
        y.sum().backward()
    nested = within(OFF, lambda x: checkpoint(inner, x, **WAYS["contexts"]))
    # Before torch 2.13 the contexts of a checkpoint that raises are open until it is collected.
    if way != "contexts" and torch.__version__ >= (2, 13):
        with REFUSED:
            nested(batch())


def grads(model, call):
    """By a backward pass, which a reentrant checkpoint needs."""
    model.zero_grad()
    x = batch()
    call(x).square().sum().backward()
    return [x.grad, *(p.grad for p in model.parameters())]
