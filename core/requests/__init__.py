"""Requests: their parameters, and the structure and text of their answers."""
