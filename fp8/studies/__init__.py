"""Measurements of low precision: of a model's casts, and of what a machine can run.
Imports all but the adapters of trainers."""
