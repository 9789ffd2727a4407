"""Casts of operands, what is saved of them for the backward pass, and statistics of casts.
Imports `fp8.tensors` and below."""
