"""The rows of `unit_scaling.rules.table.OPS`, by kind; `unit_scaling.functional` exports them."""
