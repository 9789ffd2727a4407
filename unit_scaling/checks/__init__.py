"""Checks at the first call of a model and at the first step of an optimizer."""
