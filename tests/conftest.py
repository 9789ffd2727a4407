"""`make test` runs the tests in several processes: one thread for each, and for what it starts."""

import os

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"
