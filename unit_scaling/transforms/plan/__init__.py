"""The plan of `unit_scale`: the planner, its deciders in order, and the plan as data.

Input is a recorded graph, output a `actions.Plan`. Nothing is executed here.
"""
