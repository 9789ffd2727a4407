"""The plan of `unit_scale`: the planner, its deciders in order, and the plan as data.

Input are recorded calls, output a `planner.Decided`. Nothing is executed here.
"""
