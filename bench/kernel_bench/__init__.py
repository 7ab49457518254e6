"""`baton bench kernels`."""
