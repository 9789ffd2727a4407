"""The plain model with the function of a unit-scaled one: its equations and their solution."""
