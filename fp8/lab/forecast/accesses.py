"""What a Triton kernel reads and writes, from Triton's intermediate code of a GPU ("ttgir"): its
loops, and how the lanes of a warp lie in memory."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

SECTOR = 32
"""Bytes of a sector, which the L2 cache transfers as a whole (CUDA C++ programming guide)."""


class Access(NamedTuple):
    """A read or a write of a block.

    own: bytes of a thread. moved: bytes of the block. sectors: bytes of the sectors that its
    requests touch.
    """

    reads: bool
    own: float
    moved: int
    sectors: float


class Pass(NamedTuple):
    """A loop, or the code outside of loops."""

    trips: int
    accesses: list[Access]

    def own(self, *, reads: bool) -> float:
        """The bytes that a thread reads, or writes, in a trip."""
        return sum(x.own for x in self.accesses if x.reads == reads)


class Tiles(NamedTuple):
    """threads: number in a block. stores: the bytes that single stores of a thread write. rows:
    number in a block whose loop is over rows, 0 for others."""

    threads: int
    stores: frozenset[int]
    rows: int = 0


_LOOP = re.compile(r"scf\.for .* = %(\w+) to %(\w+) step %(\w+) ")
_ACCESS = re.compile(
    r"(tt\.load|tt\.store|tt\.atomic_rmw|ttg\.async_copy_global_to_local) "
    r".*tensor<((?:\d+x)+)!tt\.ptr<\w*?(\d+)\w*>, #(\w+)"
)


def passes_of(text: str, tiles: Tiles) -> list[Pass]:
    """The code outside of loops, and each loop. Loops of inductor are not nested, and their bounds
    are constants, or 0 and a number of rows. Raises LookupError for other loops."""
    constants = {
        name: int(value)
        for name, value in re.findall(r"%(\w+) = arith\.constant (-?\d+) : i\d+", text)
    }
    layouts = _layouts(text)
    if any(_is_single(found, layouts) for found in _ACCESS.finditer(text)):
        tiles = tiles._replace(stores=frozenset())  # which explains narrow stores
    # The first pass is the code outside of loops. Loops are found by their braces: the text is
    # MLIR, one operation a line.
    passes = [Pass(1, [])]
    opened = depth = current = 0
    for line in text.splitlines():
        if found := _LOOP.search(line):
            begin, end, step = (
                constants.get(name, tiles.rows) for name in found.groups()
            )
            if not end:
                raise LookupError("a loop without constant bounds")
            passes.append(Pass(max(1, math.ceil((end - begin) / step)), []))
            current, opened = len(passes) - 1, depth
        if found := _ACCESS.search(line):
            passes[current].accesses.append(_access(found, layouts, tiles))
        depth += line.count("{") - line.count("}")
        if current and depth <= opened:
            current = 0
    return passes


def reached(passes: Iterable[Pass]) -> float:
    """Bytes of the sectors that reads touch, relative to what they ask for."""
    reads = [(x.trips, y) for x in passes for y in x.accesses if y.reads]
    moved = sum(trips * access.moved for trips, access in reads)
    return sum(trips * access.sectors for trips, access in reads) / (moved or 1)


class _Layout(NamedTuple):
    """Elements of a thread and lanes of a warp along each dimension, and the dimensions from the
    contiguous one on."""

    elements: list[int]
    lanes: list[int]
    order: list[int]


def _layouts(text: str) -> dict[str, _Layout]:
    found = re.findall(
        r"#(\w+) = #ttg\.blocked<\{sizePerThread = \[(.*?)\], threadsPerWarp = \[(.*?)\], "
        r"warpsPerCTA = \[.*?\], order = \[(.*?)\]",
        text,
    )
    layouts = {}
    for name, *parts in found:
        elements, lanes, order = ([int(n) for n in p.split(",")] for p in parts)
        layouts[name] = _Layout(elements, lanes, order)
    return layouts


def _shape(found: re.Match[str]) -> list[int]:
    return [int(n) for n in found[2].split("x") if n]


def _is_single(found: re.Match[str], layouts: Mapping[str, _Layout]) -> bool:
    """Whether each thread writes one element of a block at once, of several that it has."""
    layout, shape = layouts.get(found[4]), _shape(found)
    if found[1] != "tt.store" or layout is None or max(shape) == 1:
        return False
    return math.prod(layout.elements) == 1


def _access(
    found: re.Match[str], layouts: Mapping[str, _Layout], tiles: Tiles
) -> Access:
    kind, _, bits, name = found.groups()
    shape = _shape(found)
    size, elements = max(1, int(bits) // 8), math.prod(shape)
    # A thread asks for whole elements, also where the block has fewer elements than threads.
    own, moved = size * max(1.0, elements / tiles.threads), size * elements
    reads = kind in ("tt.load", "ttg.async_copy_global_to_local")
    access = Access(reads, own, moved, moved)
    layout = layouts.get(name)
    if layout is None or len(layout.order) != len(shape):
        return access
    inner = layout.order[0]
    vector = min(layout.elements[inner], shape[inner])
    is_apart = vector == 1 or (not reads and size < 4 and size in tiles.stores)
    if is_apart and 1 in shape and elements > tiles.threads and len(shape) > 1:
        return access._replace(sectors=SECTOR * elements)  # a column of a matrix
    # The lanes of a warp read adjacent vectors along the contiguous dimension. Where these are
    # fewer bytes than a sector, the rest of the sector is moved for nothing.
    of_warp = size * min(vector * layout.lanes[inner], shape[inner])
    return access._replace(sectors=moved * max(1.0, SECTOR / of_warp))
