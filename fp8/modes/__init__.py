"""`fp8.autocast`, the mode under which a model's products are cast, and its table of calls.
Imports `fp8.products` and below.
"""
