"""One step of a user's model: its wrappers, its call on a batch, the start of its backward pass."""

from __future__ import annotations

import copy
import inspect
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from threading import get_ident
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from ..frame import FRAMES, framed
from ..torch_internals import Arguments, Keywords, TorchFunction
from .mixin import own_attributes

T = TypeVar("T")

Batch = Any
"""A tensor, a tuple or list of positional arguments, or a mapping of keyword arguments."""

Output = Any
"""What a model returns, or a part of it."""

Loss = Callable[[Output], Tensor]
"""A function of a model's output that returns a tensor of one element."""


def unwrapped(model: nn.Module) -> nn.Module:
    """The model without the wrappers of torch.compile, DataParallel and
    DistributedDataParallel."""
    inner = getattr(model, "_orig_mod", None)
    if isinstance(inner, nn.Module):
        return unwrapped(inner)
    if isinstance(model, DataParallel | DistributedDataParallel):
        return unwrapped(model.module)
    return model


def arguments(batch: Batch) -> tuple[Arguments, Keywords]:
    """The positional and keyword arguments that a batch represents."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, tuple | list):
        return tuple(batch), {}
    return (batch,), {}


def described(error: Exception) -> str:
    """The type and the message of an error, in one line of at most 200 characters."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def call(model: nn.Module, batch: Batch) -> Output:
    """Calls the model on a batch."""
    args, kwargs = arguments(batch)
    return model(*args, **kwargs)


def copied(batch: Batch) -> Batch:
    """The copy of `detached`, for a model that changes its input; the batch itself if it has no
    copy."""
    with suppress(RuntimeError, TypeError, NotImplementedError):
        return detached(batch)
    return batch


def detached(value: Output) -> Output:
    """A copy of a batch with no storage or graph in common, whose tensors require gradients as the
    originals do."""
    copies: dict[int, Tensor] = {}
    for tensor in tensors_within(value):
        made = tensor.detach().clone()
        if tensor.requires_grad:
            made.requires_grad_()
            if not tensor.is_leaf:
                made = made.clone()  # which may be written in place
        copies[id(tensor)] = made
    return copy.deepcopy(value, copies)


def as_container(output: Output) -> Output:
    """A model's output as a dict, list or tuple. A dataclass becomes a dict."""
    if isinstance(output, Mapping):
        return dict(output)
    if isinstance(output, Tensor | list | tuple) or not hasattr(output, "__dict__"):
        return output
    return dict(vars(output))


def tensors(value: Output) -> Iterator[Tensor]:
    """The tensors in a batch or a model's output: also in lists, tuples, dicts, a dataclass."""
    value = as_container(value)
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for part in _items(value):
            if isinstance(part, Tensor | list | tuple | Mapping):
                yield from tensors(part)


def _items(container: Output) -> Iterable[Output]:
    if isinstance(container, dict):
        return container.values()
    return container


def tensors_within(value: Output, visited: set[int] | None = None) -> Iterator[Tensor]:
    """The `tensors` of a value, also of objects within objects (a distribution, a cache); none of
    modules. visited: ids of containers, each of which is read once."""
    if isinstance(value, Tensor):
        yield value
    if value is None or isinstance(value, (Tensor, str, int, float, nn.Module, type)):
        return
    if visited is None:
        visited = set()
    container = as_container(value)
    if isinstance(container, dict | list | tuple) and id(value) not in visited:
        visited.add(id(value))
        for item in _items(container):
            yield from tensors_within(item, visited)


def find_loss(output: Output) -> Tensor | None:
    """The ``loss`` of an output; else its first 0-dim tensor with a gradient, unless an auxiliary
    loss (of a router): one that does not train every parameter of the other results."""
    candidates = scalars(output)
    if not candidates:
        return None
    if _named_loss(output) is None:
        trained = leaves(t for t in tensors(output) if t.requires_grad and t.dim())
        if not trained <= leaves(candidates[:1]):
            return None
    return candidates[0]


def _named_loss(output: Output) -> Output:
    results = as_container(output)
    if isinstance(results, dict):
        return results.get("loss")
    return getattr(results, "loss", None)


def leaves(results: Iterable[Tensor]) -> set[Output]:
    """The nodes of a graph that accumulate the gradients of leaves, their ``variable``."""
    todo = [t.grad_fn for t in results]
    visited = set[Node]()
    while todo:
        node = todo.pop()
        if node is not None and node not in visited:
            visited.add(node)
            todo.extend(following for following, _ in node.next_functions)
    return {node for node in visited if hasattr(node, "variable")}


def scalars(output: Output) -> list[Tensor]:
    """The ``loss`` of an output if it requires a gradient, else all 0-dim tensors that do."""
    named = _named_loss(output)
    for parts, most in ((named, 1), (as_container(output), None)):
        losses = [t for t in tensors([parts]) if t.dim() == 0 and t.requires_grad]
        if losses:
            return losses[:most]
    return []


def loss_value(output: Output, loss: Loss | None) -> Tensor | None:
    """``loss(output)``, or `find_loss`. Raises ValueError unless it is a tensor of one element."""
    if loss is None:
        return find_loss(output)
    value: object = loss(output)
    got = type(value).__name__
    if isinstance(value, Tensor):
        if value.numel() == 1:
            return value
        got = f"a tensor of shape {tuple(value.shape)}"
    raise ValueError(f"loss must return a tensor of one element, got {got}")


def starts(
    output: Output,
    loss: Loss | None = None,
    seed: int = 0,
) -> tuple[list[Tensor], list[Tensor | None]]:
    """The tensors that a backward pass starts from, and their gradients: the loss and None, or all
    outputs and standard normal numbers. Raises as `loss_value`."""
    value = loss_value(output, loss)
    if value is not None:
        return ([value], [None]) if value.requires_grad else ([], [])
    ends = [t for t in tensors(output) if t.requires_grad]
    generator = torch.Generator().manual_seed(seed)
    return ends, [torch.randn(t.shape, generator=generator).to(t) for t in ends]


def differentiate(model: nn.Module, output: Output, loss: Loss | None) -> None:
    """A backward pass to the parameters, from where it `starts`. It stores no gradient."""
    ends, gradients = starts(output, loss)
    trained = [p for p in model.parameters() if p.requires_grad]
    if ends and trained:
        torch.autograd.grad(ends, trained, gradients, allow_unused=True)


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Evaluation mode; restores the mode of each module on exit."""
    modes: dict[nn.Module, bool] = {}
    for model in models:
        modes.update((module, module.training) for module in model.modules())
    try:
        for model in models:
            model.eval()
        yield
    finally:
        for model in models:
            model.train(modes[model])  # which a module may override
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def seeded(seed: int | None, cuda: Sequence[int] | None = None) -> Iterator[None]:
    """Seeds the generators of torch, Python and numpy (None: leaves them), and restores their
    states on exit. cuda: the devices whose generators are restored; None: all."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        with torch.random.fork_rng(cuda):
            if seed is not None:
                torch.manual_seed(seed)
                random.seed(seed)
                np.random.seed(seed % 2**32)  # noqa: NPY002
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002


def with_seed(function: TorchFunction, seed: int) -> Output:
    """The result of ``function``, which receives ``seed=`` if it takes that."""
    if "seed" in inspect.signature(function).parameters:
        return function(seed=seed)
    return function()


_PLAIN = (bool, int, float, complex, str, tuple, type(None))
_CONTAINERS = (list, dict, set, deque)


def _restorer(module: nn.Module) -> Callable[[], None]:
    """A function that restores the numbers and strings among the attributes of a module (a count of
    its calls), and the items of its lists, dicts, sets and deques, as they are now."""
    kind = type(module)
    attributes = own_attributes(module)
    plain = {n: v for n, v in attributes.items() if isinstance(v, _PLAIN)}
    containers = [v for v in attributes.values() if type(v) in _CONTAINERS]
    copies = [(container, copy.copy(container)) for container in containers]

    def restore() -> None:
        if type(module) is not kind:
            return  # its first call has initialized it, as that of a lazy module
        for name, value in own_attributes(module).items():
            if name not in attributes and isinstance(value, _PLAIN):
                del vars(module)[name]
        vars(module).update(plain)
        for container, items in copies:
            container.clear()
            if isinstance(container, list | deque):
                container.extend(items)
            else:
                container.update(items)

    return restore


@contextmanager
def untouched(model: nn.Module, seed: int | None = None) -> Iterator[None]:
    """Restores buffers, the states of random number generators, and what modules count and keep in
    Python on exit. seed: as in `seeded`."""
    tensors = [*model.parameters(), *model.buffers()]
    cuda = sorted({t.device.index for t in tensors if t.device.type == "cuda"})
    buffers = []
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if not buffer.is_meta:
                buffers.append((module, name, buffer, buffer.clone()))
    restorers = list(map(_restorer, model.modules()))
    try:
        with seeded(seed, cuda):
            yield
    finally:
        for restore in restorers:
            restore()
        with torch.no_grad():
            for module, name, buffer, before in buffers:
                if getattr(module, name) is not buffer:
                    setattr(module, name, buffer)
                if not buffer.is_meta and not torch.equal(buffer, before):
                    buffer.copy_(before)


@contextmanager
def running_modules(model: nn.Module) -> Iterator[list[str]]:
    """Within the block, the names of the modules that run in this thread, outermost first."""
    names: list[str] = []
    thread = get_ident()  # another one may run the model too

    def enter(*_: object, name: str) -> None:
        if get_ident() == thread:
            names.append(name)

    def leave(*_: object) -> None:
        if get_ident() == thread:
            names.pop()

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.enter_context(
                module.register_forward_pre_hook(partial(enter, name=name))
            )
            # After an exception too, as the model may catch it.
            hooks.enter_context(module.register_forward_hook(leave, always_call=True))
        yield names


def kept() -> AbstractContextManager[None]:
    """Within the block, parameters are written for good: a `restored` around it restores none of
    it. (`unit_scale` sets the values of a model in its first call, whoever makes it.)"""
    return framed(kept=FRAMES.items[-1].kept + 1)


class restored(TorchFunctionMode):
    """Restores the values of parameters on exit, except for what is `kept`: a momentum encoder
    updates its own in the forward pass."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__()
        self._kept = FRAMES.items[-1].kept
        self._parameters = list(parameters)
        self._at: dict[int | None, Tensor] | None = None
        self._values: dict[int | None, tuple[Tensor, Tensor]] = {}
        self._data: list[tuple[Tensor, Tensor]] = []

    def __torch_function__(
        self,
        function: TorchFunction,
        types: object,
        args: Arguments = (),
        kwargs: Keywords | None = None,
    ) -> Output:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if FRAMES.items[-1].kept > self._kept:
            return function(*args, **kwargs)
        if function == _SET_DATA:
            self._data.append((args[0], args[0].detach()))
        elif _renorms(name, args, kwargs) or is_in_place(name, kwargs):
            self._keep(tensors([args, kwargs]))
        return function(*args, **kwargs)

    def _keep(self, written: Iterable[Tensor]) -> None:
        if self._at is None:
            self._at = {storage_of(t): t for t in self._parameters}
            self._at.pop(None, None)
        for key in map(storage_of, written):
            if key in self._at and key not in self._values:
                values = self._at[key].detach()
                self._values[key] = values, values.clone()

    def wrote(self, parameter: Tensor) -> bool:
        """Whether a call has written its values, which are restored."""
        return self._is_replaced(parameter) or storage_of(parameter) in self._values

    def _is_replaced(self, parameter: Tensor) -> bool:
        """Whether its data are another tensor's."""
        return any(owner is parameter for owner, _ in self._data)

    def changed(self, parameter: Tensor) -> bool:
        """Whether a call has changed its values."""
        if self._is_replaced(parameter):
            return True
        values, before = self._values.get(storage_of(parameter), (parameter, None))
        return before is not None and not torch.equal(values, before)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        for tensor, before in reversed(self._data):
            tensor.data = before
        for tensor, before in self._values.values():
            tensor.data.copy_(before)


_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


def _renorms(
    name: str,
    args: Arguments,
    kwargs: Keywords,
) -> bool:
    """Whether a call looks up rows with a max_norm, and so rescales them in place."""
    max_norm = args[3] if len(args) > 3 else kwargs.get("max_norm")
    return name in ("embedding", "embedding_bag") and max_norm is not None


def is_in_place(name: str, kwargs: Keywords) -> bool:
    """Whether a torch call writes its result into an argument, by its name and keywords."""
    augmented = name.startswith("__i") and name != "__invert__"
    operator = augmented or name == "__setitem__"
    marked = name.endswith("_") and not name.endswith("__")
    return operator or marked or "out" in kwargs or bool(kwargs.get("inplace"))


def parameters_of(optimizer: Optimizer) -> list[Any]:
    """The parameters of all groups, in order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def in_own_thread(fn: Callable[..., T], *args: object) -> T:
    """Runs ``fn(*args)`` in its own thread, without the modes and transforms of the caller."""
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(fn, *args).result()


def storage_of(tensor: Tensor) -> int | None:
    """The address of the values of a tensor; None where there is none (sparse, wrapped)."""
    with suppress(RuntimeError):
        return tensor.untyped_storage().data_ptr() or None
    return None
