"""Notebooks and the code they share."""
