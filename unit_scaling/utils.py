"""Shows the scales of a model next to its code."""

from __future__ import annotations

import math
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import einops
import torch
from torch import Tensor, fx, nn
from torch.autograd import Function

from fp8.common.copies import deep_copy
from fp8.common.step import unwrapped
from fp8.common.validation import check_module
from fp8.torch_internals.stance import outside_compiler

from . import functional
from .transforms.track_scales import Metrics, Tap

__all__ = ["ScalePair", "ScaleTracker", "ScaleTrackingInterpreter", "analyse_module"]


@dataclass
class ScalePair:
    """The standard deviation of a tensor and of its gradient; None if unknown."""

    forward: float | None = None
    backward: float | None = None

    def __str__(self) -> str:
        return f"(-> {_short(self.forward)}, <- {_short(self.backward)})"


def _short(scale: float | None) -> str:
    if scale is None:
        return "n/a"
    return f"{scale:.3}"


class ScaleTracker(Function):
    """The identity; stores the standard deviation of its input and its gradient in a `ScalePair`.

    The standard deviation of a single element is 0.
    """

    @staticmethod
    def forward(ctx: Any, t: Tensor, scale_tracker: ScalePair) -> Tensor:
        scale_tracker.forward = Metrics.from_tensor(t).std
        ctx.scale_tracker = scale_tracker
        return t.view_as(t)

    @staticmethod
    def backward(ctx: Any, t: Tensor) -> tuple[Tensor, None]:
        ctx.scale_tracker.backward = Metrics.from_tensor(t).std
        return t, None

    @staticmethod
    def track(t: Tensor, scale_tracker: ScalePair) -> Tensor:
        """Returns ``t``, and stores its scales in ``scale_tracker``."""
        return ScaleTracker.apply(t, scale_tracker)


class ScaleTrackingInterpreter(fx.Interpreter):
    """Runs a `torch.fx.GraphModule` and records the scales of every floating-point tensor.

    Attributes:
        scales: name of a node -> its `ScalePair`; the backward part is set by the backward pass.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.scales: OrderedDict[str, ScalePair] = OrderedDict()

    def run_node(self, n: fx.Node) -> Any:
        """Returns the result of a node, tracked."""
        result = super().run_node(n)
        if isinstance(result, Tensor) and result.is_floating_point():
            self.scales[n.name] = ScalePair()
            result = ScaleTracker.track(result, self.scales[n.name])
        return result


def analyse_module(
    module: nn.Module,
    inputs: Tensor | tuple[Tensor, ...],
    backward: Tensor | None = None,
    recurse_modules: bool = True,
    syntax_highlight: bool = True,
    autowrap_modules: tuple[ModuleType, ...] = (math, einops, functional),
    autowrap_functions: tuple[Callable[..., object], ...] = (),
) -> str:
    """Returns the code of ``module`` with the standard deviation of each tensor and its gradient.

    A copy of the module runs, with all of its transforms; ``module`` and ``inputs`` get no
    gradients.

    Args:
        module: the module to analyse; its output must be one tensor.
        inputs: its arguments.
        backward: the gradient of the output; required unless the output has one element.
        recurse_modules: whether to show the code of submodules; False shows one line for each.
        syntax_highlight: use terminal colours if pygments is installed.
        autowrap_modules, autowrap_functions: not used; for compatibility with symbolic tracing.

    Raises:
        TypeError: ``module`` is not an `nn.Module`.
        RuntimeError: the output has several elements, and ``backward`` is None.

    >>> print(analyse_module(nn.ReLU(), torch.ones(2, 2), torch.ones(2, 2), syntax_highlight=False))
    def forward(self, input):  (-> 0.0, <- 0.0)
        relu = F.relu(input, inplace=False);  (-> 0.0, <- 0.0)
        return relu
    """
    check_module("analyse_module", module)
    tracked = deep_copy(unwrapped(module))
    tap = Tap(tracked, (inputs if isinstance(inputs, tuple) else (inputs,), {}))
    for path, part in () if recurse_modules else tracked.named_modules():
        if path:
            part.forward = partial(tap.call_part, path, part.forward)
    output: Any = outside_compiler(
        lambda: tap.run(tracked, lambda given: tracked(*given[0]))
    )
    output.backward(backward)
    code = "\n".join(_lines(tap.graph))
    if syntax_highlight:
        return _highlighted(code)
    return code


def _lines(graph: fx.Graph) -> Iterator[str]:
    _shorten_names(graph)
    given = (node for node in graph.nodes if node.op == "placeholder")
    inputs = [node for node in given if not node.meta.get("attribute")]
    scales = ", ".join(filter(None, map(_scales, inputs)))
    yield f"def forward({', '.join(['self', *map(repr, inputs)])}):  {scales}".rstrip()
    for node in graph.nodes:
        if node.op == "output":
            yield f"    return {node.args[0]!r}"
        elif node not in inputs:
            found = (f"{node!r} = {_expression(node)}", _scales(node))
            yield f"    {';  '.join(filter(None, found))}"


def _shorten_names(graph: fx.Graph) -> None:
    """Gives inputs and parameters short names where these are unique. A node is written by name."""
    taken = {node.name for node in graph.nodes}
    for node in graph.nodes:
        long: str = node.meta.get("attribute") or node.meta["clean_name"]
        short = long.replace(".", "_")
        if short not in taken:
            node.name = short
            taken.add(short)


def _scales(node: fx.Node) -> str:
    metrics = node.meta.get("metrics")
    if metrics is None:
        return ""
    return str(ScalePair(metrics.fwd.std, getattr(metrics.bwd, "std", None)))


_SYMBOLS: dict[Callable[..., object], str] = {
    operator.add: "+",
    operator.sub: "-",
    operator.mul: "*",
    operator.truediv: "/",
    operator.matmul: "@",
    operator.pow: "**",
}


def _expression(node: fx.Node) -> str:
    if node.op == "placeholder":
        return f"self.{node.meta['attribute']}"
    args = list(map(repr, node.args))
    if node.target in _SYMBOLS:
        return f"{args[0]} {_SYMBOLS[node.target]} {args[1]}"
    if node.target is operator.getitem:
        return f"{args[0]}[{args[1]}]"
    if node.target is getattr:
        return f"{args[0]}.{node.args[1]}"
    keywords = [f"{name}={value!r}" for name, value in node.kwargs.items()]
    if node.op == "call_method":
        return f"{args[0]}.{node.target}({', '.join([*args[1:], *keywords])})"
    function = _function(node.target)
    if node.op == "call_module":
        function = f"self.{node.target}"
    return f"{function}({', '.join([*args, *keywords])})"


def _function(target: object) -> str:
    name: str = getattr(target, "__name__", str(target))
    spaces = {"U": functional, "F": nn.functional, "torch": torch}
    for short, space in spaces.items():
        if getattr(space, name, None) is target:
            return f"{short}.{name}"
    return name


def _highlighted(code: str) -> str:
    try:
        from pygments import formatters, highlight, lexers
    except ImportError:
        return code
    return str(highlight(code, lexers.PythonLexer(), formatters.TerminalFormatter()))
