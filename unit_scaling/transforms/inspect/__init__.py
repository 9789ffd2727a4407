"""Observations of a running model: products, tensors over time, and a diagnosis."""
