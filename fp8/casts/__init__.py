"""Casts of operands, their copies saved for the backward pass, statistics of casts, and tensors of
cast values. Imports `fp8.recipes` and below."""
