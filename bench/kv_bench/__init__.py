"""`baton bench kv`, and the hand-off benchmark between two GPUs."""
