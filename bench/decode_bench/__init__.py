"""`baton bench decode`."""
