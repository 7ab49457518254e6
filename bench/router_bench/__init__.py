"""`baton bench router`, `overload` and `routing`."""
