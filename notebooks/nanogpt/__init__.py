"""A GPT trained in several ways: the program behind ``make demo`` and the notebook.

Read in this order: `model` (plain PyTorch), `data`, `settings`, `variants` (the ways),
`train` (one run), `session` (all runs of a folder), `cli`.
"""
