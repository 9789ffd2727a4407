"""Adapters for layers, optimizers and trainers of other libraries, all optional and lazily
imported. Imports everything below."""
