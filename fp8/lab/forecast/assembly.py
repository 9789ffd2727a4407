"""The machine code of a graph's Triton kernels, by Triton's own assembler and disassembler: the
instructions that a warp executes, and the bytes that pass the L2 cache.

Triton and inductor have no public way to compile for a device that is absent: the private names
that this takes are in `configurations`.
"""

from __future__ import annotations

import importlib.util
import math
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib import import_module
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from .accesses import Pass, Tiles, passes_of, reached
from .card import Card
from .compiled import Graph


class Code(NamedTuple):
    """A Triton kernel in one of the configurations that a device would time.

    blocks: number in the grid. warps: number in a block. instructions: number that a warp executes.
    trips: number of passes through its loops, one after another, each of which waits for memory; 1
    without a loop. moved: bytes of all of its requests; cached: bytes of the sectors that they
    touch. registers: number in a thread. shared: bytes of a block.
    """

    blocks: int
    warps: int
    instructions: float
    trips: float
    moved: float
    cached: float
    registers: int
    shared: int

    def waves(self, processors: int) -> float:
        """The number of blocks that a place on the card runs one after another. The limits of a
        multiprocessor are those of compute capability 9.0 (CUDA C++ programming guide)."""
        threads = 32 * self.warps
        registers = 8 * math.ceil(self.registers / 8) * threads
        fit = (
            2048 // threads,
            65536 // registers,
            (227 << 10) // (self.shared + 1024),
            32,
        )
        return max(1.0, self.blocks / (processors * max(1, min(fit))))


_KERNEL = re.compile(
    r"^(\w+) = async_compile\.triton\('\w+', '''(.*?)''', device_str='cuda'\)",
    re.M | re.S,
)


def sources(graph: Graph) -> dict[str, str]:
    """Name of a Triton kernel -> its source."""
    return dict(_KERNEL.findall(graph.source))


def codes(name: str, source: str, card: Card) -> Iterable[Code]:
    """A kernel in its configurations, inside of `card.compiling_for`. Each is compiled when it is
    asked for, once. Raises AttributeError where inductor, OSError where Triton's tools are not
    those that this module knows."""
    # Kernels of several recipes differ in their names.
    source = re.sub(r"'backend_hash': '\w+', ", "", source.replace(name, "kernel"))
    return _codes(source, card.capability)


@cache
def _codes(source: str, capability: tuple[int, int]) -> _Codes:
    return _Codes(source, capability)


class _Codes:
    """The configurations of a kernel that have been compiled, and then the others."""

    def __init__(self, source: str, capability: tuple[int, int]) -> None:
        made = configurations("kernel", source, capability)
        self._others = (code_of(one, source) for one in made)
        self._known: list[Code] = []

    def __iter__(self) -> Iterator[Code]:
        for place in count():
            if place == len(self._known):
                more = next(self._others, None)
                if more is None:
                    return
                self._known.append(more)
            yield self._known[place]


class Configuration(NamedTuple):
    """binary: Triton's result. blocks: number in the grid. sizes: the size of a block by
    dimension, "XBLOCK"."""

    binary: Any
    blocks: int
    sizes: Mapping[str, int]


def configurations(
    name: str, source: str, capability: tuple[int, int]
) -> Iterator[Configuration]:
    """Compiles a kernel in each configuration that a device would time. Those
    that the assembler refuses are left out, as on a device."""
    compiler = import_module("triton.compiler")
    refused = import_module("triton.runtime.errors").PTXASError
    arch = 10 * capability[0] + capability[1]
    target = import_module("triton.backends.compiler").GPUTarget("cuda", arch, 32)
    heuristics = import_module("torch._inductor.runtime.triton_heuristics")
    tuner = getattr(_module(source), name)
    for choice in tuner.configs:
        meta = tuner._create_compile_meta(choice)
        code = compiler.ASTSource(
            tuner.fn, meta["signature"], meta["constants"], meta["configs"][0]
        )
        options = tuner._create_compile_options(choice, meta)
        # A configuration that does not fit into registers is no candidate on a device either.
        try:
            binary = compiler.compile(code, target=target, options=options)
        except refused:
            continue
        grid = heuristics.GridExpr.from_meta(tuner.inductor_meta, choice)
        counts = grid.eval_slow({**_numbers(source), **choice.kwargs})
        yield Configuration(binary, math.prod(map(int, counts)), choice.kwargs)


def _module(source: str) -> ModuleType:
    """Generated code as a module. Triton reads the source of functions from a file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "generated.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location("generated", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


def _numbers(source: str) -> dict[str, int]:
    """The sizes that are constants of generated code: "xnumel", and the sizes of its blocks."""
    found = re.findall(
        r"^\s+(\w*numel\w*|\w+BLOCK)(?:: tl\.constexpr)? = (\d+)$", source, re.M
    )
    return {name: int(value) for name, value in found}


def code_of(made: Configuration, source: str) -> Code:
    """What a compiled kernel executes."""
    binary, blocks, sizes = made
    warps = binary.metadata.num_warps
    text = _disassembly(binary.asm["cubin"])
    steps = _steps(text)
    # Instructions of a loop count once for each trip, and trips are known from the loops of the
    # compiler's own code, in the same order.
    loops = _loops(steps)
    stores = frozenset(step.bytes for step in steps if step.name.startswith("STG"))
    rows = sizes.get("RSPLIT_SIZE", 0) // sizes.get("XBLOCK", 1)
    tiles = Tiles(32 * warps, stores, rows)
    passes = passes_of(binary.asm["ttgir"], tiles)
    trips = _trips(loops, passes[1:])
    executed = _executed(steps, loops, trips)
    cached = tiles.threads * _asked(steps, executed) * reached(passes)
    moved = 0.0
    for part in passes:
        moved += part.trips * sum(x.moved for x in part.accesses)
        cached += part.trips * sum(x.sectors for x in part.accesses if not x.reads)
    registers = max(map(int, re.findall(r"\bR(\d+)\b", text)), default=0) + 3
    share = _share({**_numbers(source), **sizes})
    return Code(
        blocks=blocks,
        warps=warps,
        instructions=sum(executed),
        trips=max(1.0, sum(trips)),
        moved=blocks * share * moved,
        cached=blocks * share * cached,
        registers=registers,  # two are the driver's
        shared=binary.metadata.shared,
    )


def _share(numbers: Mapping[str, int]) -> float:
    """The share of the elements of all blocks that exist."""
    share = 1.0
    for name, number in numbers.items():
        size = numbers.get(name.removesuffix("numel").upper() + "BLOCK")
        if name.endswith("numel") and size:
            share *= number / (size * math.ceil(number / size))
    return share


class _Step(NamedTuple):
    """An instruction: its name, and the place to which it branches back, or None."""

    name: str
    back: int | None = None

    @property
    def bytes(self) -> int:
        """The bytes that a thread reads or writes in global memory."""
        if not self.name.startswith(("LDG", "STG", "RED", "ATOMG")):
            return 0
        sizes = {"64": 8, "128": 16, "U8": 1, "S8": 1, "U16": 2, "S16": 2}
        return next((sizes[x] for x in self.name.split(".") if x in sizes), 4)


class _Span(NamedTuple):
    """A loop: the places of its first and last instruction, and the bytes of a thread and trip."""

    first: int
    last: int
    read: int
    written: int


_LINE = re.compile(
    r"^\s*(?:(\.L_\w+):|/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?(\S+)(.*);)", re.M
)


def _steps(text: str) -> list[_Step]:
    """The instructions up to the last exit."""
    # Only a branch to an earlier label closes a loop.
    steps: list[_Step] = []
    labels: dict[str, int] = {}
    for label, name, rest in _LINE.findall(text):
        if label:
            labels[label] = len(steps)
            continue
        target, back = re.search(r"`\((\.L_\w+)\)", rest), None
        if name.startswith("BRA") and target is not None:
            back = labels.get(target[1])  # known only of labels before it
        steps.append(_Step(name, back))
    # What stands behind the last exit is padding.
    exits = [i for i, step in enumerate(steps) if step.name == "EXIT"]
    return steps[: max(exits, default=len(steps)) + 1]


def _loops(steps: list[_Step]) -> list[_Span]:
    loops = []
    for last, step in enumerate(steps):
        if step.back is not None:
            body = steps[step.back : last + 1]
            read = sum(x.bytes for x in body if x.name.startswith("LDG"))
            written = sum(x.bytes for x in body) - read
            loops.append(_Span(step.back, last, read, written))
    return loops


def _disassembly(cubin: bytes) -> str:
    tool = import_module("triton.knobs").nvidia.nvdisasm.path
    # nvdisasm reads files alone.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        done = subprocess.run([tool, "-c", path], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"nvdisasm: {done.stderr.strip()}")
    return done.stdout


def _trips(loops: list[_Span], passes: list[Pass]) -> list[float]:
    """The trips of each loop of the machine code. The assembler unrolls a loop several times, and
    what is left is another loop or none: bytes tell which and how often."""
    trips, before = list[float](), 0
    left = [float(part.trips) for part in passes]
    shares = [(part.own(reads=True), part.own(reads=False)) for part in passes]
    for loop in loops:
        moved = loop.read + loop.written
        if not moved or not passes:
            trips.append(1.0)
            continue
        unrolled = [moved / max(read + written, 1.0) for read, written in shares]
        wrong = [
            round(abs(loop.read - times * read) / moved, 2)
            for times, (read, _) in zip(unrolled, shares, strict=True)
        ]
        before += wrong[before:].index(min(wrong[before:]))
        times = max(1.0, round(unrolled[before]))
        trips.append(left[before] // times)
        left[before] -= times * trips[-1]
    return trips


def _executed(
    steps: list[_Step], loops: list[_Span], trips: list[float]
) -> list[float]:
    """How often a warp executes each instruction."""
    times = [float(step.name != "NOP") for step in steps]
    for loop, trip in zip(loops, trips, strict=True):
        for i in range(loop.first, loop.last + 1):
            times[i] *= trip
    return times


def _asked(steps: list[_Step], executed: list[float]) -> float:
    """Bytes that a thread reads. For reads below 8 bytes the rest of a sector is in the L1 cache,
    where wider reads are the kernel's."""
    narrow = wide = 0.0
    for step, times in zip(steps, executed, strict=True):
        if step.name.startswith("LDG"):
            narrow += times * step.bytes
            wide += times * step.bytes * (step.bytes >= 8)
    return wide or narrow
