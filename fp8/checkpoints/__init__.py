"""Models for inference engines. Imports `fp8.layers` and below."""
