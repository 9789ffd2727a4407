"""Records a run of a model: every torch call, and the origin of its arguments."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node
from torch.func import debug_unwrap

from fp8.common.step import restored, tensors_within
from fp8.modes.control_flow import run_within, runs_functions
from fp8.modes.dispatch import OPERATORS, expansion
from fp8.modes.early import EarlyMode
from fp8.torch_internals.calling_function import function_of
from fp8.torch_internals.hidden_functions import called
from fp8.torch_internals.running_calls import python_frames

from ...common.calls import Args, Function, Given, Kwargs
from .kinds import (
    CONSTANT,
    PRODUCTS,
    RECURRENT,
    TRANSPARENT,
    canonical,
    is_added,
    kind_of,
    name_of,
    writes,
)
from .values import has_scale, is_strided, rms_of

Slot = tuple[int | str, ...]
"""Where a tensor is in a call: (1,) is the second argument; ("weight",); (0, 2) in a list."""


@dataclass(frozen=True)
class Input:
    """A tensor argument: its slot, and the node that it comes from."""

    slot: Slot
    node: int


@dataclass
class CallNode:
    """One call, or an external tensor (function None): a parameter, an input, a buffer.

    kind: as in `record.kinds`; "" for one that is not seen. inside: the autograd function in which
    it, or a module that makes it, runs. writes: whether it writes into arguments, written: which.

    Of its result: parameter: the name of the parameter that it is. origin: also of one that it is a
    view or copy of. live: whether it depends on a parameter or a floating-point input. computed: on
    parameters only.
    """

    kind: str
    name: str
    path: str = ""
    function: Function | None = None
    inputs: list[Input] = field(default_factory=list)
    args: Args = ()
    kwargs: Kwargs = field(default_factory=dict)
    inside: str = ""
    writes: bool = False
    written: tuple[Slot, ...] = ()
    numel: int = 0
    floating: bool = False
    parameter: str | None = None
    origin: str | None = None
    live: bool = False
    computed: bool = False

    @property
    def is_value(self) -> bool:
        """Whether it is no weight, and no constant."""
        return self.live and not self.computed

    @property
    def factors(self) -> list[Input]:
        """The arguments that it multiplies."""
        return [i for i in self.inputs if not is_added(self.kind, i.slot)]

    @property
    def added(self) -> list[Input]:
        """The arguments that it adds."""
        return [i for i in self.inputs if is_added(self.kind, i.slot)]

    @property
    def tensors(self) -> dict[Slot, Tensor]:
        return arguments_in(self.args, self.kwargs)


def tensors_in(value: object, slot: Slot = ()) -> Iterator[tuple[Slot, Tensor]]:
    """The tensors of arguments with their slots, recursively through lists, tuples and dicts."""
    if isinstance(value, Tensor):
        yield slot, value
    for key, item in items_in(value).items():
        yield from tensors_in(item, (*slot, key))


def items_in(value: object) -> dict[Any, object]:
    """The items of a list, tuple or dict; none of other values."""
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    return value if isinstance(value, dict) else {}


def arguments_in(args: Args, kwargs: Kwargs) -> dict[Slot, Tensor]:
    """The tensors of a call by their slots."""
    return dict((*tensors_in(args), *tensors_in(kwargs)))


def mapped(change: Callable[[Tensor], object], value: Any) -> Any:
    """``value`` with its tensors changed, recursively through lists, (named) tuples and dicts."""
    if isinstance(value, Tensor):
        return change(value)
    if next(tensors_in(value), None) is None:
        return value
    if isinstance(value, dict):
        return {name: mapped(change, item) for name, item in value.items()}
    items = [mapped(change, item) for item in value]
    if isinstance(value, list):
        return items
    return getattr(type(value), "_make", tuple)(items)


class Calls(EarlyMode):
    """A torch-function mode that observes each call of a model, and not what that calls in turn. A
    call with an `expansion` is observed as the calls that it is composed of, and an einsum of three
    or more operands as products of two.

    paths: those of the modules that are running, outermost first, where the caller knows them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._busy = False
        self.paths: list[str] = []

    @property
    def path(self) -> str:
        """The path of the innermost running module."""
        return "".join(self.paths[-1:])

    @abstractmethod
    def observe(self, function: Function, args: Args, kwargs: Kwargs) -> object:
        """Makes a call of the model and returns its result."""

    def sees(self) -> bool:
        """Whether the call is the model's."""
        return not self._busy

    def __torch_function__(
        self,
        function: Function,
        types: object,
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if not self.sees():
            return called(function, args, kwargs)
        expanded = expansion(function, args, kwargs)
        if expanded is not None:
            with self:
                return expanded()
        if runs_functions(function):
            return run_within(self, function, args, kwargs)
        return self.see(function, args, kwargs)

    def see(self, function: Function, args: Args, kwargs: Kwargs) -> object:
        """`observe`, during which no call is seen."""
        self._busy = True
        try:
            return self.observe(function, args, kwargs)
        finally:
            self._busy = False


@dataclass(frozen=True)
class Place:
    """A call in a pass. It is the same in each pass over a model, also where another part of the
    model (a router's choice) differs.

    path: of the running module. number: of earlier calls of this kind in that module.
    """

    path: str
    kind: str
    number: int


class Pass(Calls):
    """Observes one forward pass of a model."""

    def __init__(self) -> None:
        super().__init__()
        self._counts: Counter[tuple[str, str]] = Counter()

    @abstractmethod
    def before(
        self, place: Place, function: Function, args: Args, kwargs: Kwargs
    ) -> Any:
        """Called before a call, with `canonical` arguments. `after` receives what it returns."""

    @abstractmethod
    def after(self, place: Place, results: list[Tensor], begun: Any) -> None:
        """Called with the tensors that a call has computed, if there are any."""

    def begin(self, arguments: Given) -> None:
        """Called with the arguments of the model before it runs."""

    def end(self, output: object, written: restored) -> None:
        """Called with the output of the model. written: knows which parameters it has written."""

    def name(self, parameter: Tensor, name: str) -> None:
        """Takes a tensor for a parameter from now on, whatever calls have made it."""

    def observe(self, function: Function, args: Args, kwargs: Kwargs) -> object:
        args, kwargs = canonical(function, args, kwargs)
        # Reading an attribute of a tensor passes through the modes that are active, too.
        with torch.DisableTorchFunction():
            path = self.path
            kind = kind_of(function)
            place = Place(path, kind, self._counts[path, kind])
            begun = self.before(place, function, args, kwargs)
        output = function(*args, **kwargs)
        with torch.DisableTorchFunction():
            computed = args[0] if kind == "setitem" else output
            results = [t for _, t in tensors_in(computed)]
            if results:
                self._counts[path, kind] += 1
                self.after(place, results, begun)
        return output


class Recorder(Pass):
    """Records the calls of a model while it runs, as ``nodes``; each refers to earlier ones only.
    Results of products are divided by their RMS."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self._parameters = {id(p): name for name, p in model.named_parameters()}
        self._inputs: frozenset[int] = frozenset()
        self.nodes: list[CallNode] = []
        self.index_of: dict[Place, int] = {}
        self.outputs: list[int] = []  # the nodes of the results
        # The parameters that the model writes, and those that it changes by that.
        self.written = self.changed = set[str]()
        self._node_of: dict[int, int] = {}
        self._makers: dict[Node, int] = {}
        self._alive: list[Tensor] = []  # ids of dead tensors are reused

    def begin(self, arguments: Given) -> None:
        self._inputs = frozenset(id(t) for _, t in tensors_in(arguments))

    def end(self, output: object, written: restored) -> None:
        named = dict(self._model.named_parameters())
        self.written = {name for name, p in named.items() if written.wrote(p)}
        self.changed = {n for n in self.written if written.changed(named[n])}
        for t in tensors_within(output):
            is_known = id(t) in self._node_of or t.grad_fn is not None
            if is_known and has_scale(t):
                self.outputs.append(self._index(t))

    def name(self, parameter: Tensor, name: str) -> None:
        if id(parameter) not in self._parameters:
            self._parameters[id(parameter)] = name
            self._node_of.pop(id(parameter), None)

    def before(
        self, place: Place, function: Function, args: Args, kwargs: Kwargs
    ) -> CallNode:
        name = str(function)
        if not isinstance(function, OPERATORS):
            name = name_of(function)
        node = CallNode(
            place.kind, name, place.path, function, args=args, kwargs=kwargs
        )
        node.writes = writes(function, name, args, kwargs)
        given = node.tensors.items()
        node.inputs = [Input(slot, self._index(tensor)) for slot, tensor in given]
        sources = [self.nodes[i.node] for i in node.inputs]
        if node.kind in TRANSPARENT and sources:
            node.origin = sources[0].origin
        node.computed = _is_computed(node.kind, sources)
        return node

    def after(self, place: Place, results: list[Tensor], begun: CallNode) -> None:
        node = begun
        self.index_of[place] = len(self.nodes)
        node.inside = running_function()
        ids = {id(t) for t in results}
        arguments = node.tensors
        if node.writes:
            node.written = tuple(s for s, t in arguments.items() if id(t) in ids)
        # Arguments that it returns may be used by themselves.
        returned = ids.intersection(map(id, arguments.values()))
        if node.written:
            returned = set()
        self.nodes.append(node)
        if ids == returned:
            return
        node.numel = max(map(Tensor.numel, results))
        node.floating = any(map(has_scale, results))
        differs = node.floating and node.kind not in CONSTANT
        node.live = differs and any(self.nodes[i.node].live for i in node.inputs)
        # As after unit_scale: sizes that are read of what follows are those of the scaled model.
        is_product = node.kind in PRODUCTS and node.floating and len(results) == 1
        if is_product and is_strided(results[0]) and not node.inside:
            with torch.no_grad():
                results[0].div_(rms_of(results[0]))
        self._remember([t for t in results if id(t) not in returned])

    def _index(self, tensor: Tensor) -> int:
        """The node that a tensor comes from, which is added if it is not known."""
        inner = debug_unwrap(tensor)
        if id(inner) in self._parameters:
            tensor = inner  # which torch.func.grad differentiates by
        maker = tensor.grad_fn
        if maker is not None and self._is_hidden(tensor, maker):
            # Functions of extensions, and those without gradients inside, make no visible call.
            if maker not in self._makers:
                self._add_hidden(tensor, maker)
            self._node_of[id(tensor)] = self._makers[maker]
            self._alive.append(tensor)
        if id(tensor) not in self._node_of:
            name = self._parameters.get(id(tensor))
            node = CallNode("", name or "input", parameter=name, origin=name)
            node.numel = tensor.numel()
            node.floating = has_scale(tensor)
            node.computed = name is not None
            is_read = node.computed or id(tensor) in self._inputs
            node.live = node.floating and is_read
            self.nodes.append(node)
            self._remember([tensor])
        return self._node_of[id(tensor)]

    def _is_hidden(self, tensor: Tensor, maker: Node) -> bool:
        """Whether autograd derives a tensor from others by more than the calls that were seen."""
        if id(tensor) not in self._node_of:
            return True
        index = self._node_of[id(tensor)]
        if maker.name() == _RECOMPUTES:
            self._makers[maker] = index
        is_ours = self._makers.get(maker) == index
        chosen = isinstance(maker, BackwardCFunction) and not is_ours
        return chosen or not self.nodes[index].live

    def _add_hidden(self, tensor: Tensor, maker: Node) -> None:
        """Adds the function whose gradient ``maker`` computes, as a call that nothing scales."""
        known = self._known_before(maker)
        inputs = [Input((place,), index) for place, index in enumerate(known)]
        function_class = getattr(maker, "_forward_cls", None)
        module = getattr(function_class, "__module__", "")
        # The functions of torch.distributed move values between processes.
        is_move = module.startswith("torch.distributed.")
        kind = "clone" if is_move and len(inputs) == 1 else ""
        name = maker.name().rstrip("0123456789").removesuffix("Backward")
        inside = f"the autograd function {name}"
        if id(tensor) in self._node_of and not isinstance(maker, BackwardCFunction):
            name, inside = "copy_", ""  # into a view of the tensor
        elif is_move or module.partition(".")[0] in ("fp8", "unit_scaling"):
            inside = ""

        node = CallNode(kind, name, self.path, type(maker), inputs, inside=inside)
        node.numel = tensor.numel()
        node.floating = node.live = True
        node.computed = _is_computed("", [self.nodes[i.node] for i in inputs])
        self.nodes.append(node)
        self._makers[maker] = len(self.nodes) - 1

    def _known_before(self, maker: Node) -> list[int]:
        """The nodes that autograd derives a function's arguments from."""
        known: dict[int, None] = {}
        todo = [maker]
        seen = {maker}
        while todo:
            for function, _ in todo.pop().next_functions:
                if function is None or function in seen:
                    continue
                seen.add(function)
                leaf = getattr(function, "variable", None)
                if function in self._makers:
                    known[self._makers[function]] = None
                elif leaf is not None:
                    known[self._index(leaf)] = None
                else:
                    todo.append(function)
        return list(known)

    def _remember(self, tensors: list[Tensor]) -> None:
        """Records that the tensors come from the latest node."""
        latest = len(self.nodes) - 1
        for tensor in tensors:
            self._node_of[id(tensor)] = latest
            self._alive.append(tensor)
            if tensor.grad_fn is not None:
                self._makers[tensor.grad_fn] = latest


_RECOMPUTES = "CheckpointFunctionBackward"
"""What autograd calls a checkpoint with ``use_reentrant=True``, whose gradient is that of the calls
within."""


def _is_computed(kind: str, sources: list[CallNode]) -> bool:
    """Whether the result depends on parameters and not on the model's inputs, which integer tensors
    are too. Products of parameters are values."""
    live = [source for source in sources if source.live]
    others = [source for source in sources if not source.live]
    if not live or kind in PRODUCTS | RECURRENT:
        return False
    return all(v.computed for v in live) and all(v.floating for v in others)


_PACKAGE = Path(__file__).parents[3]
_OURS = [str(_PACKAGE / name) for name in ("fp8", "unit_scaling")]
_LIBRARIES = (str(Path(torch.__file__).parent), *_OURS)
_PASSES = str(Path(__file__).parents[1] / "values" / "passes.py")


def running_function() -> str:
    """The outermost autograd function of the model that is running; "" for none."""
    inside = ""
    for frame in python_frames():
        file = frame.f_code.co_filename
        if file == _PASSES and frame.f_code.co_name == "run_pass":
            break  # the recorded model begins here
        if not file.startswith(_LIBRARIES):
            inside = function_of(frame) or inside
    return inside
