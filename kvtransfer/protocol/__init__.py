"""The hand-off protocol that both sides share: frames, messages, coverage and proofs. It does no I/O."""
