"""Measured factors: corrections of forward factors, and gauges of gradients.

Both are measured in one step of a copy of the model under its plan, and are the same in all
processes of a job.
"""
