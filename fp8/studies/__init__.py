"""Studies of low precision: of a model's casts, of how it trains (preflight), and of what a machine
can run. Imports everything else in `fp8`."""
