"""`fp8.forecast`: what a GPU would run for a training step, read from the compiler's own code on a
machine without one. Imports `fp8.lab.hardware` and the core."""
