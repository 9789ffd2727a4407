"""Layers, optimizers and trainers of other libraries. Each is optional and imported late.
Imports everything below.
"""
