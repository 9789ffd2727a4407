"""Per-thread context: the active recipe of `fp8.autocast`. Imports `fp8.native` and below."""
