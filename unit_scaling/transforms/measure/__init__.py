"""What the planner leaves to measurement: corrections of forward factors, and gauges of gradients.

One step of a copy of the model under its plan; the same result in all processes of a job.
"""
