"""`make test` runs the tests in several processes: one thread for each, and for what it starts."""

import os
import sys
from collections.abc import Iterator, Sequence

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(autouse=True, scope="module")
def nothing_compiled_before() -> Iterator[None]:
    """Torch compiles one function, such as its own wrappers, a few times only: not the sum of what
    the files before this one have compiled."""
    yield
    if "torch._dynamo" in sys.modules:
        import torch

        torch.compiler.reset()


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """What runs with backend "native" needs FP8 products, which torch 2.11 has for GPUs only."""
    given = [(item, getattr(item, "callspec", None)) for item in items]
    native = [item for item, call in given if call and "native" in map(str, call.params.values())]
    if native:
        import torch

        from fp8.kernels import why_not_device

        if why_not := why_not_device(torch.device("cpu")):
            for item in native:
                item.add_marker(pytest.mark.skip(reason=why_not))
