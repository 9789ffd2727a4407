"""`track_scales`: measures the scale of every tensor of a model, forward and backward."""

from __future__ import annotations

import copy
import inspect
import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import debug_unwrap
from torch.fx import Graph, Node

from fp8.common.step import as_container, unwrapped
from fp8.common.validation import check_module, check_name
from fp8.frame import Stack
from fp8.torch_internals.decorators import untraced
from fp8.torch_internals.stance import outside_compiler

from ..common.calls import Args, Function, Given, Kwargs
from .compile import M, copied
from .install import Call, Scope, install
from .record.calls import items_in, mapped, tensors_in
from .record.kinds import name_of
from .record.probe import Observer, is_observed, unseen
from .replace import OPERATORS

_FULL_NAMES = {
    "mean_abs": "mean absolute value",
    "abs_mean": "absolute mean value",
    "std": "standard deviation",
    "abs_max": "absolute maximum",
    "abs_min": "absolute minimum",
    "numel": "number of elements",
    "rms": "root mean square",
}


class Metrics:
    """The scale of a tensor in the forward pass, ``fwd``, and of its gradient, ``bwd``.

    ``bwd`` is None until the gradient is known.

    Args:
        fwd_tensor: floating point, any shape.
    """

    @dataclass
    class Data:
        """Statistics of one tensor, computed in float32, or in float64 for float64.

        ``std`` is the square root of the unbiased variance, and 0 for a single element. A tensor
        without elements has 0 for every number; NaN propagates to every number.
        """

        mean_abs: float
        abs_mean: float
        std: float
        abs_max: float
        abs_min: float
        numel: int
        rms: float = 0.0

    def __init__(self, fwd_tensor: Tensor) -> None:
        self.fwd = self.from_tensor(fwd_tensor)
        self.bwd: Metrics.Data | None = None

    def set_bwd(self, bwd_tensor: Tensor) -> None:
        """Records the gradient."""
        self.bwd = self.from_tensor(bwd_tensor)

    def __repr__(self) -> str:
        return f"Metrics(fwd={self.fwd}, bwd={self.bwd})"

    @staticmethod
    def from_tensor(t: Tensor) -> Metrics.Data:
        """Returns the statistics of a floating-point tensor of any shape; inside of a transform of
        `torch.func`, of all that it maps."""
        x = debug_unwrap(t.detach())
        if x.is_sparse:
            x = x.to_dense()
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        if x.numel() == 0:
            return Metrics.Data(0.0, 0.0, 0.0, 0.0, 0.0, 0)
        sizes = x.abs()
        # 0 for a single element, where torch has NaN.
        std = x.std(correction=min(1, x.numel() - 1))
        rms = torch.linalg.vector_norm(x) / x.numel() ** 0.5
        numbers = [sizes.mean(), x.mean().abs(), std, sizes.max(), sizes.min(), rms]
        # One synchronization of the device for all numbers.
        found = torch.stack([number.double() for number in numbers])
        mean_abs, abs_mean, spread, high, low, rms = debug_unwrap(found).tolist()
        return Metrics.Data(mean_abs, abs_mean, spread, high, low, x.numel(), rms)

    @staticmethod
    def get_full_name(short_name: str) -> str:
        """Returns the full name of a metric, for plots.

        Raises:
            ValueError: the name is unknown.
        """
        check_name("metric", short_name, _FULL_NAMES)
        return _FULL_NAMES[short_name]

    @staticmethod
    def names() -> list[str]:
        """The names of the numbers in `Data`."""
        return list(_FULL_NAMES)

    @staticmethod
    def full_names() -> list[str]:
        """The full names of the numbers in `Data`."""
        return list(_FULL_NAMES.values())


# The graph

_OPERATORS: dict[str, Function] = {
    **{name_of(method): function for function, method in OPERATORS.items()},
    "pow": operator.pow,
    "neg": operator.neg,
    "__getitem__": operator.getitem,
    "__setitem__": operator.setitem,
}
"""Tensor methods that Python operators call: ``x + y`` is indistinguishable from ``x.add(y)``."""


_REQUIRE_GRAD = Tensor.requires_grad.__set__  # type: ignore[attr-defined]


class Tap(Observer):
    """Records the graph of one call of a model, with `Metrics` for each floating-point tensor.
    given: its arguments, with copies of tensors that do not require a gradient."""

    def __init__(self, module: nn.Module, given: Given) -> None:
        super().__init__()
        self.graph = Graph()
        self._handles: list[Any] = []
        self._nodes: dict[int, Node] = {}
        # id -> (name of the node, name in the model)
        self._names: dict[int, tuple[str, str]] = {}
        self._alive: list[Tensor] = []  # ids of dead tensors are reused
        self._parts: dict[Function, str] = {}
        for kind in ("parameters", "buffers"):
            for name, tensor in getattr(module, f"named_{kind}")():
                *path, leaf = name.split(".")
                owner = "_modules_".join(["self", *path])
                self._names[id(tensor)] = (f"{owner}_{kind}_{leaf}", name)
        self.given = args, kwargs = mapped(_differentiable, given)
        arguments = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        for slot, tensor in tensors_in(arguments):
            name = "_".join(map(str, slot))
            node = self.graph.placeholder(name)
            with unseen():
                self._record(node, tensor)
            # fx renames a placeholder called input to input_1.
            node.meta["clean_name"] = name

    def run(self, model: nn.Module, call: Call) -> object:
        """Returns ``call(given)``, a call of the model."""
        with self.of(model):
            output = call(self.given)
        node = self.graph.output(self._written(as_container(output)))
        node.meta.update(
            clean_name="output", outputs_float_tensor=False, requires_grad=False
        )
        self._nodes.clear()
        self._alive.clear()
        return output

    def release(self) -> None:
        """Removes the hooks on tensors that outlive the call: parameters and inputs."""
        for handle in self._handles:
            handle.remove()

    def call_part(
        self, path: str, forward: Function, *args: object, **kwargs: object
    ) -> object:
        """Calls the forward of a submodule, as one node."""
        self._parts[forward] = path
        if self.sees():
            return self.see(forward, args, kwargs)
        return forward(*args, **kwargs)

    def observe(self, function: Function, args: Args, kwargs: Kwargs) -> Any:
        if function == _REQUIRE_GRAD and args[0].requires_grad:
            return None  # already set, and cannot be set on a result computed from an input
        with unseen():
            written = self._written(args), self._written(kwargs)
        output = function(*args, **kwargs)
        result = args[0] if name_of(function) == "__setitem__" else output
        if next(tensors_in(result), None) is not None:
            with unseen():
                self._record(self._call(function, *written), result)
        return output

    def _written(self, value: Any) -> Any:
        """Returns ``value`` with nodes in place of tensors; unknown tensors become placeholders."""

        def node_of(tensor: Tensor) -> Node:
            if id(tensor) not in self._nodes:
                name, attribute = self._names.get(id(tensor), ("tensor", None))
                node = self.graph.placeholder(name)
                node.meta["attribute"] = attribute
                self._record(node, tensor)
            return self._nodes[id(tensor)]

        return mapped(node_of, value)

    def _call(self, function: Function, args: Args, kwargs: Kwargs) -> Node:
        name = name_of(function)
        if function in self._parts:
            return self.graph.call_module(self._parts[function], args, kwargs)
        if getattr(function, "__name__", "") == "__get__":  # a tensor property
            return self.graph.call_function(getattr, (args[0], name))
        if getattr(Tensor, name, None) != function:
            return self.graph.call_function(function, args, kwargs)
        if name in _OPERATORS and not kwargs:
            return self.graph.call_function(_OPERATORS[name], args)
        return self.graph.call_method(name, args, kwargs)

    def _record(self, node: Node, value: object) -> None:
        """Measures the result of a node. Each tensor in a tuple or dict gets its own node."""
        floating = isinstance(value, Tensor) and value.is_floating_point()
        node.meta.update(
            clean_name=node.name,
            outputs_float_tensor=floating,
            requires_grad=node.op == "placeholder" and isinstance(value, nn.Parameter),
            path=self.path,
        )
        if isinstance(value, Tensor):
            self._nodes[id(value)] = node
            self._alive.append(value)
            if floating:
                # Hooks of a wrapper of torch.func are not called.
                self._measure(node, debug_unwrap(value))
        for key, item in items_in(value).items():
            if next(tensors_in(item), None) is not None:
                part = self.graph.call_function(operator.getitem, (node, key))
                self._record(part, item)

    def _measure(self, node: Node, value: Tensor) -> None:
        metrics = node.meta["metrics"] = Metrics(value)
        if value.requires_grad and torch.is_grad_enabled():
            # The gradient of a part of a split that nothing reads is None.
            handle = value.register_hook(
                lambda g: None if g is None else metrics.set_bwd(g)
            )
            if value.is_leaf or node.op == "placeholder":
                self._handles.append(handle)


_in_eager_mode = untraced(
    lambda call: call(),
    "track_scales measures the model in eager mode: compile it without fullgraph=True",
)


class Track(Scope):
    """Measures the calls of the whole model; entered first, so that all transforms run eagerly."""

    order = -1

    def __init__(self) -> None:
        super().__init__()
        self.graph = Graph()
        self._latest = Stack()  # the tap of this thread's latest call

    def __reduce__(self) -> Any:
        return Track, ()

    def run(
        self,
        call: Call,
        module: nn.Module,
        path: str,
        given: Given,
        is_eager: bool = False,
    ) -> object:
        # In torch 2.11, is_exporting is true for every graph that the compiler traces.
        traced = torch.compiler.is_dynamo_compiling()
        is_exported = torch.compiler.is_exporting() and not traced
        if path or is_observed() or is_exported:
            return call()
        eagerly = _in_eager_mode if traced else outside_compiler
        return eagerly(lambda: self._measured(call, module, given))

    def _measured(self, call: Call, module: nn.Module, given: Given) -> object:
        while self._latest.items:
            self._latest.items.pop().release()
        tap = Tap(module, given)
        self._latest.items.append(tap)
        output = tap.run(module, call)
        self.graph = tap.graph
        return output

    def scales_graph(self) -> Graph:
        """Returns the graph of the latest call; an empty graph before the first."""
        return self.graph


def _differentiable(tensor: Tensor) -> Tensor:
    """The tensor itself, or a copy that requires a gradient if the tensor does not."""
    if tensor.requires_grad or not (
        tensor.is_floating_point() and torch.is_grad_enabled()
    ):
        return tensor
    return tensor.detach().requires_grad_().clone()


def track_scales(module: M) -> M:
    """Returns a copy of ``module`` that measures its tensors, forward and backward, as it runs.

    The copy has the new method ``scales_graph()``, which returns the `torch.fx.Graph` of the latest
    call, with a node for each call of torch and `unit_scaling.functional` and for each input,
    parameter and buffer used. ``node.meta["metrics"]`` is the `Metrics` of a floating-point tensor;
    it has the gradient after the backward pass. All values are those the model computed, with all
    of its transforms, applied before or after.

    Floating-point inputs that do not require a gradient are replaced by copies that do, so that
    their gradients are measured; the caller's tensors are not changed. Calls of a submodule on its
    own and exported models are not measured. A compiled model runs in eager mode; compiling it with
    fullgraph=True is an error.

    Args:
        module: the model; it is not changed.

    Raises:
        TypeError: ``module`` is not an `nn.Module`.

    >>> model = track_scales(nn.Sequential(nn.Linear(4, 8), nn.ReLU()))
    >>> model(torch.ones(2, 4)).sum().backward()
    >>> [node.meta["clean_name"] for node in model.scales_graph().nodes][:3]
    ['input', 'self_modules_0_parameters_weight', 'self_modules_0_parameters_bias']
    """
    check_module("track_scales", module)
    result = copied(module, "track_scales")
    inner: Any = unwrapped(result)
    track = Track()
    install(inner, track)
    # An attribute of the instance, as in unit-scaling 0.3.5: the class stays the user's.
    inner.scales_graph = track.scales_graph
    return result


# Pruning


def prune_non_float_tensors(graph: Graph) -> Graph:
    """Returns a copy of a graph of `track_scales` without nodes that are not floating-point
    tensors.

    A reader of such a node gets its one floating-point input instead, or None if it has none or
    several.

    Raises:
        TypeError: ``graph`` is not a `torch.fx.Graph`.
        ValueError: the graph was not made by `track_scales`.
    """
    return _pruned(graph, lambda node: not _is_float(node))


def prune_same_scale_tensors(graph: Graph, rtol: float = 2**-16) -> Graph:
    """Returns a copy of a graph of `track_scales` without nodes of the same scale as their input.

    Such nodes (views, casts) have one floating-point input with the same mean absolute value, and
    the same mean absolute gradient if there is one. Their readers get the input instead.

    Args:
        graph: a graph of `track_scales`.
        rtol: the allowed relative difference; slices change the mean slightly.

    Raises:
        TypeError: ``graph`` is not a `torch.fx.Graph`.
        ValueError: the graph was not made by `track_scales`.
    """

    def same(node: Node) -> bool:
        source = _float_input(node)
        if source is None or not _is_float(node):
            return False
        a = source.meta["metrics"]
        b = node.meta["metrics"]
        return _close(a.fwd, b.fwd, rtol) and _close(a.bwd, b.bwd, rtol)

    return _pruned(graph, same)


def prune_selected_nodes(graph: Graph, targets: Iterable[Function | str]) -> Graph:
    """Returns a copy of a graph without the nodes that call one of ``targets``. Their readers get
    other arguments as in `prune_non_float_tensors`.

    Args:
        graph: any graph.
        targets: functions, or names of methods.

    Raises:
        TypeError: ``graph`` is not a `torch.fx.Graph`.
    """
    chosen = list(targets)
    return _pruned(graph, lambda node: node.target in chosen, tracked=False)


def _pruned(graph: Graph, prune: Callable[[Node], bool], tracked: bool = True) -> Graph:
    if not isinstance(graph, Graph):
        raise TypeError(
            f"graph is a torch.fx.Graph, as of scales_graph(), got {type(graph).__name__}"
        )
    nodes = list(graph.nodes)
    if tracked and any("outputs_float_tensor" not in node.meta for node in nodes):
        raise ValueError(
            "the graph is not one of track_scales: its nodes have no metrics"
        )
    graph = copy.deepcopy(graph)
    for node in graph.nodes:
        if node.op != "output" and prune(node):
            source: Any = _float_input(node)
            for user in list(node.users):
                user.replace_input_with(node, source)
            graph.erase_node(node)
    graph.lint()
    return graph


def _is_float(node: Node) -> bool:
    return bool(node.meta.get("outputs_float_tensor"))


def _float_input(node: Node) -> Node | None:
    """The only floating-point input of a node; None if there are none or several."""
    first, *others = [*filter(_is_float, node.all_input_nodes), None]
    if len(others) == 1:
        return first
    return None


def _close(a: Metrics.Data | None, b: Metrics.Data | None, rtol: float) -> bool:
    if a is None or b is None:
        return a is b
    return math.isclose(a.mean_abs, b.mean_abs, rel_tol=rtol)
