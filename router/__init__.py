"""The front door: tokenizes, validates, admits, picks workers, forwards tokens; never tensors, never worker code."""
