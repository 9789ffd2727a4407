"""What `unit_scale` does about each call: the planner, its deciders in order, and the plan as data.

A recorded graph goes in, a `steps.Plan` comes out. Nothing runs here.
"""
