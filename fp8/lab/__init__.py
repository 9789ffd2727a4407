"""The lab: studies of a model in low precision (preflight, parity), statistics of its casts, sums
of tensor cores, hardware. Loaded when used; imports everything else in `fp8`."""
