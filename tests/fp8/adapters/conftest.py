"""Of the tests of all adapters: the seed, and TransformerEngine."""

from __future__ import annotations

import pytest
import torch

from tests.fp8.adapters.te_library import te  # noqa: F401


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
