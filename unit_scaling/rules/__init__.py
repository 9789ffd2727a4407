"""The rules of ops: the table OPS, quadrature, elementwise factors, the batch of a step.
Imports `scale`, `constraints` and `common`.
"""
