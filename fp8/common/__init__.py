"""What every part needs and none owns: checks of arguments, warnings, reports, state of threads,
modules that gain a behaviour, the use of torch.compile, one step of a user's model.
Imports nothing of the package.
"""
