"""The version: both packages are one distribution."""

from fp8.version import __version__

__all__ = ["__version__"]
