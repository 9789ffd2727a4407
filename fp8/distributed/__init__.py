"""Communication between processes in FP8: reduction of gradients, gathering of weights.
Imports `fp8.surgery`, `fp8.optim` and below."""
