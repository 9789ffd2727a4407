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


def runs_native(item: pytest.Item) -> bool:
    """Whether the mark or a parameter of a test says so."""
    call = getattr(item, "callspec", None)
    given = call.params.values() if call else ()
    return item.get_closest_marker("native") is not None or "native" in map(str, given)


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """What runs with backend "native" needs FP8 products, which torch 2.11 has for GPUs only."""
    if native := [item for item in items if runs_native(item)]:
        import torch

        from fp8.kernels import why_not_device

        if why_not := why_not_device(torch.device("cpu")):
            for item in native:
                item.add_marker(pytest.mark.skip(reason=why_not))
