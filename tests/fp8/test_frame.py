"""What is in force in a thread, in several threads, generators and tasks: each computes what it
computes alone."""

import asyncio
from contextlib import nullcontext

import torch
from torch import nn
from torch.nn import functional as F

import fp8
from tests.fp8.compare import outcome
from tests.shared import assert_close, assert_same, normal, parametrize, refuses
from tests.threads import Meet, meeting, together

X = normal(16, 32)
W = normal(32, 32, seed=1)
RECIPES = ("unit", "tensor", "row")


def model():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(32, 32), Meet(), nn.GELU(), Meet(), nn.Linear(32, 8))


def step(model, x=X):
    x = x.clone().requires_grad_()
    return outcome(lambda: model(x), [x, *model.parameters()])


def within(block, call, *args):
    with block:
        return call(*args)


def product(recipe="unit"):
    return within(fp8.autocast(recipe), F.linear, X, W)


def nothing_is_cast():
    return torch.equal(F.linear(X, W), torch.ops.aten.linear(X, W))


def test_a_recipe_for_each_thread():
    plain, net = model(), model()
    alone = [within(fp8.autocast(recipe), step, net) for recipe in RECIPES]
    calls = [lambda r=recipe: within(fp8.autocast(r), step, net) for recipe in RECIPES]
    with meeting(4):
        *got, outside = together(*calls, lambda: step(plain))
    assert_same(got, alone)
    assert_same([outside], [step(plain)])


@parametrize("recipe", [None, *RECIPES])
def test_one_block_or_one_converted_model_in_several_threads(recipe):
    block, net = fp8.autocast("unit") if recipe is None else nullcontext(), model()
    net = net if recipe is None else fp8.convert(net, recipe)
    calls = [lambda i=i: within(block, step, net, X * i) for i in (1, 2, 3)]
    alone = [call() for call in calls]
    with meeting(3):
        assert_same(together(*calls), alone)


# What holds a block open


def held(recipe):
    with fp8.autocast(recipe):
        yield F.linear(X, W)
        yield F.linear(X, W)


def test_generators_close_blocks_innermost_first():
    expected = product()
    first, second = held("unit"), held("tensor")
    next(first)
    list(held("tensor"))  # nested
    assert_same(next(first), expected)
    next(second)
    with refuses("closed innermost first: close those of a generator", RuntimeError):
        first.close()
    second.close()
    assert nothing_is_cast()


def test_a_block_is_closed_in_its_thread():
    block = fp8.autocast("unit")
    block.__enter__()
    with refuses("closed in the thread that has opened it", RuntimeError):
        together(lambda: block.__exit__(None, None, None))
    block.__exit__(None, None, None)
    assert nothing_is_cast()


def test_a_block_in_each_task():
    expected = [*map(product, RECIPES)]

    async def calls(recipe):
        outputs = []
        for _ in range(3):
            await asyncio.sleep(0)
            outputs.append(product(recipe))
            await asyncio.sleep(0)
            assert nothing_is_cast()
        return outputs

    async def main():
        return await asyncio.gather(*map(calls, RECIPES))

    assert_same(asyncio.run(main()), [[y] * 3 for y in expected])


@parametrize("enabled", [True, False])
def test_a_block_of_another_task_is_refused(enabled):
    """Whichever of the two is innermost, neither computes under the recipe of the other."""

    async def main():
        opened, close = asyncio.Event(), asyncio.Event()

        async def hold():
            with fp8.autocast("unit", enabled=enabled):
                opened.set()
                await close.wait()

        task = asyncio.create_task(hold(), name="holder")
        await opened.wait()
        with refuses(r"open in holder, another task.*before await", RuntimeError):
            F.linear(X, W)
        assert_same(product("tensor"), expected)
        close.set()
        await task
        assert nothing_is_cast()

    expected = product("tensor")
    asyncio.run(main())


# The compiler


def counted(function, **options):
    """``function`` compiled, and a list with an entry for each graph."""
    graphs = []
    backend = lambda graph, _: graphs.append(1) or graph  # noqa: E731
    return torch.compile(function, backend=backend, **options), graphs


def test_blocks_that_are_compiled():
    """One graph for all threads, with blocks open in others or not."""
    fn, graphs = counted(product, fullgraph=True)
    got = [fn(), *together(*[fn] * 3)]
    assert_close(got, [product()] * 4)
    assert graphs == [1]
