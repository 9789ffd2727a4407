"""What is written to disk: training states, and models for inference engines.
Imports `fp8.surgery` and below.
"""
