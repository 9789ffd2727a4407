"""`make test` runs the tests in several processes: one thread for each, and for what it starts."""

import os
import sys
from collections.abc import Iterator

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
