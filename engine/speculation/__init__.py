"""Speculative decoding: how many drafts a step makes, how they are made, and which are accepted."""
