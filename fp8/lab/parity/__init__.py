"""`fp8.parity`: one checkpoint under the policies of its trainer and of an inference engine.
Imports the core and `fp8.adapters`."""
