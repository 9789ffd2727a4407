"""Records what a model does: its calls, their kinds, and the data flow between them.

A copy of the model runs under a mode that records each call. No decisions are made here.
"""
