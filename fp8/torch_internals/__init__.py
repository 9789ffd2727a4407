"""Workarounds of torch, a file each, which begins with what it works around and in which versions.
Imports nothing of ``fp8`` but `fp8.frame`."""

from collections.abc import Callable
from typing import Any, TypeAlias

# What torch does not type: the contexts of autograd functions and the instances of modules have
# attributes of any name, a mode gets every function of torch with every
# argument, and the memo of `copy.deepcopy` maps ids to copies of any object.
Context: TypeAlias = Any
Layer: TypeAlias = Any
Arguments = tuple[Any, ...]
Keywords = dict[str, Any]
Memo = dict[int, Any]
TorchFunction = Callable[..., Any]
