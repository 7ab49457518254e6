"""The systems that `baton bench kv` compares, each as a sender and a receiver with the same two interfaces."""
