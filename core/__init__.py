"""Types, config, errors, clock and metrics that every room shares; imports no other room."""
