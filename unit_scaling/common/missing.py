"""Names that torch has and a module of this package has not."""

from collections.abc import Callable
from typing import Any


def refusing(module: str, torchs: Any) -> Callable[[str], Any]:
    """Returns the ``__getattr__`` of ``module``. torchs: torch's module of the same names."""

    def __getattr__(name: str) -> Any:
        advice = "use torch's, in a model of unit_scale or with a factor of your own (scale_fwd)"
        known = f": {advice}" if hasattr(torchs, name) else ""
        raise AttributeError(f"module {module!r} has no attribute {name!r}{known}")

    return __getattr__
