"""`unit_scale` with a batch: it multiplies parameters by numbers, and leaves a plain model.
Imports the recorder and the planner."""
