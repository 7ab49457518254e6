"""Types, configuration, errors, clock and metrics that every package shares; imports no other package."""
