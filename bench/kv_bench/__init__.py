"""`baton bench kv`, and the hand-off between two GPUs."""
