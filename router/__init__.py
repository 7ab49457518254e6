"""The router: tokenizes, validates, admits, places and streams requests; handles no tensors, runs no worker code."""
