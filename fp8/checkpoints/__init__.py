"""Files: training checkpoints, and models for inference engines.
Imports `fp8.surgery` and below."""
