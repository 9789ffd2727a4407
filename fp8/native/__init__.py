"""Products computed by hardware FP8 kernels, and the self-test that compares them with simulation.
Imports `fp8.casts` and below."""
