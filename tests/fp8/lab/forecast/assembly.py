"""Assembles the Triton kernels of a forecast's graphs, as a GPU's driver would get them."""

import importlib.util
import re
import tempfile
from pathlib import Path

_KERNEL = re.compile(
    r"^(\w+) = async_compile\.triton\('\w+', '''(.*?)''', device_str='cuda'\)",
    re.M | re.S,
)


def assembled(graph, card):
    """Kernel -> its machine code for the card, in the first of the configurations that a device
    would time. Inside of `fp8.lab.forecast.card.compiling_for`."""
    return {
        name: _assembled(name, text, card)
        for name, text in _KERNEL.findall(graph.source)
    }


def _assembled(name, text, card):
    import triton
    from triton.backends.compiler import GPUTarget

    tuner = getattr(_module(text), name)
    first = tuner.configs[0]
    meta = tuner._create_compile_meta(first)
    source = triton.compiler.ASTSource(
        tuner.fn, meta["signature"], meta["constants"], meta["configs"][0]
    )
    options = tuner._create_compile_options(first, meta)
    binary = triton.compile(
        source, target=GPUTarget("cuda", card.arch, 32), options=options
    )
    return binary.asm["cubin"]


def _module(text):
    """Triton reads the source of functions from a file."""
    path = Path(tempfile.mkdtemp()) / "generated.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("generated", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
