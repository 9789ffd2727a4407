"""`fp8.forecast`: what a GPU would run for a training step, read from the compiler's own code on a
machine without one, or estimated from the sizes of products. Imports the core, `fp8.lab.hardware`
and `fp8.lab.trace`."""
