"""Runs a model under its plan: installs the transform, executes plans and saves them. `scope` is
what a transformed model holds; it gets plans from `measure.look`, and `replay` runs them."""
