"""Checkpoint directories: their files and names, whether these are complete and fit, and how they are read."""
