"""Products whose sums are those of a tensor core: `Recipe.accumulate`. Imports `fp8.products` and
below."""
