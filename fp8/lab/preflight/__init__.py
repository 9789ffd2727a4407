"""`fp8.preflight`: which layers of a model train in which recipe, and what that saves.
Imports `fp8.lab` beside itself, and everything else in `fp8`."""
