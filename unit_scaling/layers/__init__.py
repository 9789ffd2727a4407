"""The unit-scaled modules.
Imports `functional`, `parameter` and below; `unit_scaling.modules` exports them.
"""
