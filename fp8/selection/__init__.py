"""Which layers of a model can be cast, their roles, and the recipe that a policy gives each of
them. Imports `fp8.products` and below."""
