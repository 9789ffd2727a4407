"""A model under its plan: how it gains the transform, what its calls do, and how it is saved.

`scope` is what a transformed model holds; it asks `measure.look` for plans and `replay` runs them.
"""
