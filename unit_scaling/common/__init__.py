"""What every part needs: watched functions, constants of graphs, errors of arguments.
Imports nothing of the package.
"""
