"""The unit-scaled functions: each a row of OPS, its rule beside its body.
Imports `rules`, `core` and below; `unit_scaling.functional` exports them.
"""
