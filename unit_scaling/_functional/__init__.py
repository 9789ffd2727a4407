"""The rows of `unit_scaling.ops.OPS`, by kind. `unit_scaling.functional` has them all."""
