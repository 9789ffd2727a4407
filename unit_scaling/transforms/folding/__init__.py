"""The plain model equivalent to a unit-scaled one: equations for its factors, and their
solution."""
