"""What every part needs: watched functions, errors of arguments and of names, constants of graphs.
Imports nothing of the package.
"""
