"""Training in low precision: weights, gradients and states in FP8, what is sent between processes,
and norms. Imports `fp8.layers`, `fp8.optim` and below."""
