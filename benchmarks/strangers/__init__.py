"""Does `unit_scale` work on models of other libraries? `python -m benchmarks.strangers --help`."""
