"""What every part needs: watched functions, errors of arguments, constants of graphs.
Imports nothing of the package.
"""
