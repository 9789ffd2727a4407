"""Runs a model under its plan, which `transform` holds, `learn` makes and `replay` executes."""
