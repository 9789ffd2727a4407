"""How an operand is cast, what of it is saved for the backward pass, and what is counted meanwhile.
Imports `fp8.tensors` and below.
"""
