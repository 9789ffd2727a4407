"""Products computed by FP8 kernels of the hardware: a file for each kernel, their table, and the
self-test that compares them with the simulation. Imports `fp8.casts` and below."""
