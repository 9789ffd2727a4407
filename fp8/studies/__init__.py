"""What low precision does to a model on a machine, answered by measuring.
Imports all but the adapters of trainers.
"""
