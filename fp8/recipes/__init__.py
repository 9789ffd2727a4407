"""Recipes: the cast of each operand of a layer's three products, and how its scale is computed.
Imports `fp8.formats` and below."""
