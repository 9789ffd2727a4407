"""Models for inference engines. Imports `fp8.surgery` and below."""
