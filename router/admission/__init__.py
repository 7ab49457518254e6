"""Decides which request goes to the workers next, which wait, and which are refused at once."""
