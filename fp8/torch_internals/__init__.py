"""Workarounds of torch, a file each, which begins with what it works around and in which versions.
Imports nothing of ``fp8`` but `fp8.frame`."""
