"""The time of a compiled step: of its kernels on the card, and of the host that launches them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..hardware import BF16, Cores, Hardware
from .assembly import Code, codes, sources
from .card import CARDS
from .compiled import OTHER, TRITON, Graph, Kernel

LEAST = 20e6
"""Bytes that a Triton kernel moves at least if its instructions are counted, which takes about half
a second for each configuration. A smaller one takes less than 6 µs on an H100."""


class Times(NamedTuple):
    """Seconds of a step.

    card: the sum of its kernels. host: seconds in which the CPU launches them. peak: the sum of the
    kernels at the rates of the data sheet. uncounted: why the bytes of Triton kernels alone count;
    "" if their instructions count too.
    """

    card: float
    host: float
    peak: float
    uncounted: str = ""


def times(graphs: Sequence[Graph], device: Hardware) -> Times:
    """The times of a step's graphs, inside of `card.compiling_for`."""
    card = peak = 0.0
    uncounted = ""
    for graph in graphs:
        counted = _Counts(graph, device)
        for kernel in graph.kernels:
            peak += by_bytes(kernel, device, at_peak=True)
            card += counted.seconds(kernel)
        uncounted = uncounted or counted.why_not
    return Times(card, host_seconds(graphs, device), peak, uncounted)


def host_seconds(graphs: Iterable[Graph], device: Hardware) -> float:
    """The time in which the CPU launches all kernels."""
    host, total = device.host, 0.0
    for graph in graphs:
        total += host.graph
        for kernel in graph.kernels:
            if kernel.kind == TRITON:
                # Inductor's launcher; other kernels pass torch's dispatcher.
                total += host.triton
                continue
            total += host.library
            if kernel.kind != OTHER and kernel.name.startswith("torch.ops."):
                total += host.python
    return total


def by_bytes(kernel: Kernel, device: Hardware, at_peak: bool = False) -> float:
    """The time of a kernel by the roofline: its operations, or the bytes that it moves."""
    unit, flops = BF16, kernel.flops
    if kernel.kind == "fp8":
        unit = "fp8"
    if kernel.kind == "fp32":  # TF32 has half the rate
        flops *= 2
    return device.seconds(unit, flops, kernel.moved, at_peak, kernel.narrowest)


def by_code(code: Code, cores: Cores) -> float:
    """The least time of a Triton kernel in one configuration: of its instructions, of the sectors
    that pass the cache, and of its loops' trips, each of which waits for the one before it."""
    return max(
        cores.issue(code.blocks * code.warps * code.instructions),
        code.cached / cores.cache,
        code.waves(cores.processors) * code.trips * cores.latency,
        cores.shortest,
    )


class _Counts:
    """What the Triton kernels of a graph execute. why_not: as `Times.uncounted`."""

    def __init__(self, graph: Graph, device: Hardware) -> None:
        self._sources, self._device, self.why_not = sources(graph), device, ""

    def seconds(self, kernel: Kernel) -> float:
        """The time of a kernel in the fastest of its configurations."""
        cores, least = self._device.cores, by_bytes(kernel, self._device)
        if kernel.kind != TRITON:
            return least
        if cores is None:
            self.why_not = f"the clock of {self._device.name} is not known"
            return least
        # Neither count is known for small kernels and combined ones: they take the shortest time.
        combined = "combo_grid_meta" in self._sources.get(kernel.name, "")
        if kernel.moved < LEAST or combined:  # of whose parts a block executes one
            return max(least, cores.shortest)
        fastest, bytes_alone = math.inf, least
        try:
            for code in self._codes(kernel):
                # The compiler counts the whole of a tensor of which a kernel reads a part.
                least = min(bytes_alone, code.moved / self._device.stream)
                fastest = min(fastest, max(least, by_code(code, cores)))
                # No configuration is faster than its bytes.
                if fastest <= least:
                    break
        except (AttributeError, ImportError, LookupError, OSError, TypeError) as error:
            self.why_not = f"{type(error).__name__}: {error}"
        if fastest == math.inf:
            self.why_not = self.why_not or "no configuration compiles"
            return max(bytes_alone, cores.shortest)
        return fastest

    def _codes(self, kernel: Kernel) -> Iterable[Code]:
        source = self._sources.get(kernel.name, "")
        return codes(kernel.name, source, CARDS[self._device.name])
