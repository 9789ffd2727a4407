"""Rewriting the graphs of a model, alone and with the other transforms."""

from copy import deepcopy

import torch
from torch import nn
from torch.fx import symbolic_trace
from torch.nn import functional as F

from tests.shared import Net, assert_close, assert_same, linears, refuses
from unit_scaling.transforms import compile, simulate_fp8, unit_scale
from unit_scaling.transforms.utils import (
    apply_transform,
    patch_to_expand_modules,
    replace_node_with_function,
    torch_nn_modules_to_user_modules,
)


def net():
    torch.manual_seed(0)
    return linears(4, 4, nn.ReLU, 4)


def replacing(old, new, seen=None):
    def backend(graph, inputs):
        for node in list(graph.graph.nodes):
            if seen is not None:
                seen.append(node.target)
            if node.target is old:
                replace_node_with_function(
                    graph.graph, node, new, args=node.args[:1], kwargs={}
                )
        graph.recompile()
        return graph

    return backend


def double(x):
    return 2 * x


def expected(model, x, function):
    return model[2](function(model[0](x)))


def test_apply_transform():
    x, model = torch.randn(3, 4), net()
    seen = []
    once = apply_transform(model, replacing(F.relu, F.silu, seen))
    assert_close(once(x), expected(model, x, F.silu))
    assert F.relu in seen
    assert_close(model(x), expected(model, x, F.relu))  # it is a copy
    twice = apply_transform(once, replacing(F.silu, double))
    assert_close(twice(x), expected(model, x, double))
    assert_close(deepcopy(once)(x), expected(model, x, F.relu))
    twice(x).sum().backward()
    assert twice[0].weight.grad is not None
    for both in (
        compile(once),
        apply_transform(compile(model), replacing(F.relu, F.silu)),
    ):
        assert_close(both(x), expected(model, x, F.silu))  # compiled last


def test_with_the_other_transforms():
    """In any order, and each of them once: a mode must not see its own graph run."""
    x, model = torch.randn(64, 4), net()
    for transform in (simulate_fp8, unit_scale):
        plain = transform(model)
        plain(x)
        seen = []
        for both in (
            apply_transform(plain, replacing(None, None, seen)),
            transform(apply_transform(model, replacing(None, None, seen))),
        ):
            both(x)
            assert_close(both(x), plain(x))
            assert seen
            seen.clear()


def test_a_backend_in_between_must_return_a_graph():
    model = apply_transform(net(), lambda graph, inputs: graph.forward)
    with refuses("returned no GraphModule", Exception):
        apply_transform(model, replacing(F.relu, F.silu))(torch.randn(3, 4))
    with refuses(r"needs an nn\.Module, got function", TypeError):
        apply_transform(F.relu, replacing(F.relu, F.silu))


def helper(x):
    return F.relu(x) + 1


def test_functions_that_stay_one_call():
    seen = []
    model = Net(lambda m, x: helper(x))
    apply_transform(model, replacing(None, None, seen), [helper])(torch.ones(2))
    assert helper in seen
    assert F.relu not in seen


def test_replace_node_with_function():
    graph = symbolic_trace(lambda x, y: F.relu(x) + y)
    (relu,) = [n for n in graph.graph.nodes if n.target is F.relu]
    relu.type = torch.Tensor
    replace_node_with_function(graph.graph, relu, torch.mul, (relu.args[0], 3), {})
    graph.graph.lint()
    graph.recompile()
    assert graph(torch.ones(1), torch.ones(1)).item() == 4
    (mul,) = [n for n in graph.graph.nodes if n.target is torch.mul]
    assert mul.type is torch.Tensor
    args = mul.args
    replace_node_with_function(graph.graph, mul, torch.sub, keep_type_expr=False)
    (sub,) = [n for n in graph.graph.nodes if n.target is torch.sub]
    assert (sub.type, sub.args) == (None, args)


def test_modules_of_torch_become_user_modules():
    model, x = net(), torch.randn(3, 4)
    before, children = model(x), list(model)
    torch_nn_modules_to_user_modules(model)
    assert type(model) is nn.Sequential
    assert list(model) == children
    assert type(model[0]).__name__ == "trivial_subclass_modules_linear_Linear"
    assert isinstance(model[0], nn.Linear)
    assert_same(model(x), before)
    assert_same(deepcopy(model)(x), before)
    assert patch_to_expand_modules(F.relu) is F.relu
