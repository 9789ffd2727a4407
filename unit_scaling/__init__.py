"""Scales: what factor each operation needs so that every tensor has RMS about 1."""
