"""`fp8.dump`: writes the operands of chosen products to files, before and after their casts."""

from __future__ import annotations

from collections.abc import Container, Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..casts.counts import CastRecorder, Observed
from ..common.libraries import need
from ..common.mixin import check_module
from .stats import Sampler


class _DumpRecorder(CastRecorder):
    """Keeps copies of the operands that match a pattern, until `write`."""

    def __init__(self, model: nn.Module, patterns: tuple[str, ...]) -> None:
        super().__init__(model, 1)
        self.seen: set[str] = set()
        self.tensors: dict[str, Tensor] = {}
        self.open = False
        self._patterns = patterns

    def count(self, layer: str, operand: str, seen: Observed) -> None:
        name = f"{layer}.{operand.replace(' ', '_')}"
        self.seen.add(name)
        if not any(fnmatchcase(n, p) for n in (layer, name) for p in self._patterns):
            return
        if not self.open:
            raise RuntimeError(f"fp8.dump: {name} is cast after its block: put backward inside")
        number = sum(key.startswith(f"{name}.before") for key in self.tensors) + 1
        last = f".{number}" if number > 1 else ""
        self.tensors[f"{name}.before{last}"] = _copy(seen.x)
        self.tensors[f"{name}.after{last}"] = _copy(seen.y)
        if seen.scale is not None and not seen.scale.dim():
            self.tensors[f"{name}.scale{last}"] = _copy(seen.scale)


def _copy(x: Tensor) -> Tensor:
    return x.detach().to("cpu", copy=True).contiguous()


class Dump(Sampler):
    """Returned by `dump`. Use it as a context manager around a forward and backward pass.

    Attributes:
        files: the files written so far.
    """

    def __init__(
        self, model: nn.Module, patterns: tuple[str, ...], steps: Container[int], to: Path
    ) -> None:
        self._mine = _DumpRecorder(model, patterns)
        super().__init__(self._mine, lambda number: number in steps)
        self.files: list[Path] = []
        self._patterns = patterns
        self._to = to

    def __enter__(self) -> Dump:
        super().__enter__()
        self._mine.open = self._open.items[-1]
        return self

    def __exit__(self, *error: Any) -> None:
        recorded, self._mine.open = self._mine.open, False
        super().__exit__(*error)
        tensors, self._mine.tensors = self._mine.tensors, {}
        if not recorded or error[0] is not None:
            return
        if not tensors:
            names = sorted(self._mine.seen)
            raise ValueError(
                f"fp8.dump: no cast operand matches {', '.join(map(repr, self._patterns))}; the "
                f"pass had {', '.join(names[:8]) or 'none'}{', ...' if len(names) > 8 else ''}"
            )
        self._to.mkdir(parents=True, exist_ok=True)
        step = self.passes - 1
        path = self._to / f"step-{step:06d}.safetensors"
        need("safetensors").save_file(tensors, path, {"step": str(step)})
        self.files.append(path)


def dump(
    model: nn.Module,
    pattern: str | Iterable[str],
    *,
    steps: Container[int] = range(1),
    to: str | Path,
) -> Dump:
    """Writes the operands of the products of ``model`` that match, in the given steps, to files.

    Each recorded step becomes ``to/step-000010.safetensors``, with the tensors
    ``LAYER.OPERAND.before`` (as given), ``.after`` (as the product uses it, in the same dtype) and,
    if the operand has one scale factor, ``.scale``. Layers are named as in `stats`; operands are
    input, weight and grad, with "_again" for the cast of their second product. Further casts of the
    same operand in a step end with ".2", ".3": of a layer that is called again, or of the groups
    of a grouped product that have tokens. The tensors are those of this process.

    A recorded step runs in eager mode, as with `stats`; others are not affected. Of nested blocks
    of this kind the innermost one records.

    Args:
        model: provides the names of layers; not changed. It may be under `fp8.autocast`, converted
            or compiled.
        pattern: a glob, or several, on the name of a layer or of an operand: "*.mlp.*",
            "*.down_proj.grad".
        steps: the numbers of the passes to record, from 0; a pass is one use of the context.
        to: the folder, created if needed. Files of the same step are replaced.

    Returns:
        A `Dump`, to be used as a context manager around the forward and backward pass of a step.

    Raises:
        TypeError: if ``model`` is not a module, or for steps without ``in``.
        ValueError: if there is no pattern, and at the end of a recorded step in which nothing
            matched.
        RuntimeError: for a matching cast after the block, as long as the `Dump` exists: the
            backward pass belongs inside.
        ImportError: without safetensors.

    >>> import tempfile, torch, fp8
    >>> model = fp8.convert(torch.nn.Sequential(torch.nn.Linear(4, 4)), "tensor")
    >>> folder = tempfile.mkdtemp()
    >>> dumped = fp8.dump(model, "0", steps=range(0, 100, 10), to=folder)
    >>> for _ in range(12):
    ...     with dumped:
    ...         model(torch.ones(2, 4)).sum().backward()
    >>> [path.name for path in dumped.files]
    ['step-000000.safetensors', 'step-000010.safetensors']
    """
    check_module("dump", model)
    patterns = (pattern,) if isinstance(pattern, str) else tuple(pattern)
    if not patterns or not all(isinstance(p, str) and p for p in patterns):
        raise ValueError(f"dump needs a pattern of names, got {pattern!r}")
    if not hasattr(steps, "__contains__"):
        raise TypeError(f"steps must be a range or collection of numbers, got {steps!r}")
    need("safetensors")
    return Dump(model, patterns, steps, Path(to))
