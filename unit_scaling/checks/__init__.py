"""Checks of a model's first call and of an optimizer's first step, and of measured tensors."""
