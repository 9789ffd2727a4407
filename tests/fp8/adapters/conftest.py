"""TransformerEngine, for the tests of all adapters."""

from tests.fp8.adapters.te_library import te  # noqa: F401
