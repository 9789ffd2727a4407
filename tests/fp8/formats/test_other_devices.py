"""What compiled code computes on other devices than CPUs: traced on the meta device, run here."""

import pytest
import torch

from fp8.formats.format import FORMATS
from fp8.formats.quantize import in_dtype
from fp8.formats.rounding import divided
from tests.fp8.oracles import all_patterns
from tests.shared import in_one_graph, seeded


def of_another_device(function, *args):
    """``function(*args)`` by the graph that is compiled for another device."""
    graphs = []

    def record(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    in_one_graph(function, record)(*(x.to("meta") for x in args))
    (graph,) = graphs
    return graph(*args)[0]


ONE_BYTE = [
    name for name, f in FORMATS.items() if f.dtype is not None and f.dtype.itemsize == 1
]


def equal(found, wanted, bits):
    """To the bit, but for the sign of NaN."""
    nan = wanted.isnan()
    same = torch.where(nan, found.isnan(), found.view(bits) == wanted.view(bits))
    return bool(same.all())


@pytest.mark.parametrize("name", ONE_BYTE)
def test_inf_is_nan_before_a_conversion_to_e5m2(name):
    """And every other number, -0 too, is as it was."""
    dtype, x = FORMATS[name].dtype, all_patterns(torch.bfloat16).float()
    wanted = torch.where(x.isinf(), torch.nan, x) if name == "e5m2" else x
    found = of_another_device(lambda x: in_dtype(x, dtype), x)
    assert equal(found, wanted.to(dtype), torch.uint8)


def test_division():
    x = all_patterns(torch.bfloat16).float()
    scale = torch.rand(x.shape, generator=seeded(0)) * 2 + 1e-3
    assert equal(of_another_device(divided, x, scale), x / scale, torch.int32)
    by_number = of_another_device(lambda x: divided(x, 448.0), x)
    assert equal(by_number, x / 448.0, torch.int32)
