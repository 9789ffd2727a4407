"""The documents, and `build`, which writes those that are tables of the code."""
