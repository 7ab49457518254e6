"""The systems that `baton bench kv` compares, each a sender and a receiver behind the same two faces."""
