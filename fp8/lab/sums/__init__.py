"""Products that sum as a tensor core does: `Recipe.accumulate`. Imports `fp8.products` and
below."""
