"""Measurements of `baton bench`, their rows and their plots."""
