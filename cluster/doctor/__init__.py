"""Checks of `baton doctor`."""
