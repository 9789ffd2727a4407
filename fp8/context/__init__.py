"""Per-thread context: the active recipe of `fp8.autocast`, and detection of recomputed segments.
Imports `fp8.native` and below."""
