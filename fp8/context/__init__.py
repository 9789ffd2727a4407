"""What is in force in a thread: the recipe of `fp8.autocast`, and its use in recomputed segments.
Imports `fp8.native` and below.
"""
