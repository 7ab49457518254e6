"""The ranks of one worker: how they connect, exchange plans and tensors, and detect which one failed."""
