"""`fp8.autocast`, the mode under which products are cast, and its dispatch table.
Imports `fp8.products` and below."""
