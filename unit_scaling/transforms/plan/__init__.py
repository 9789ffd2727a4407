"""The plan of `unit_scale`: the planner, its deciders in order, and the plan as data.

Input is a recorded graph, output a `steps.Plan`. Nothing is executed here.
"""
