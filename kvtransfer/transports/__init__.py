"""What carries a hand-off: control channels and data paths."""
