"""What the tests of the adapters share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fp8.adapters import te_signatures
from tests.wheels import unpacked


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TransformerEngine's published wheel, unpacked; skips where it cannot be fetched."""
    requirement = f"transformer_engine=={te_signatures.VERSION}"
    return unpacked(requirement, tmp_path_factory.mktemp("transformer_engine"))
