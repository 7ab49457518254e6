"""Runs one request at the workers, over as many attempts as it takes."""
