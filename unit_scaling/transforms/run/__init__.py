"""Runs a model under its plan. `transform` is what a transformed model holds; `learn` makes its
plan and `replay` executes it."""
