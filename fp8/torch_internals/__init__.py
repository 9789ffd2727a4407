"""Workarounds of torch, a file each, which begins with what it works around and in which versions.
Imports nothing of ``fp8`` but `fp8.frame`."""

from typing import Any

# torch sets attributes of any name and type on the contexts of autograd functions, and passes to
# ``setup_context`` what ``forward`` got.
Context = Any
Arguments = tuple[Any, ...]
Keywords = dict[str, Any]
