"""Starts and watches deployments: command line, placement on Ray, supervision, diagnosis."""
