"""Layers of a model: which can be cast, their roles and recipes, and converting them.
Imports `fp8.modes` and below."""
