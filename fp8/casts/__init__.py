"""Casts of operands, their copies saved for the backward pass, and statistics of casts.
Imports `fp8.tensors` and below."""
