"""Transports of the hand-off: control channels and data paths."""
