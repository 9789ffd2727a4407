"""The plan of `unit_scale`: what decides it from recorded calls, and its data."""
