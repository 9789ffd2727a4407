"""`fp8.record`: what the casts of a training lose, written while it runs; the page of a record, and
the first step at which two records part. Imports the watch of converted layers."""
