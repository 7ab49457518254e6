"""What both ends of a hand-off share: frames, messages, coverage, proofs. Sans I/O."""
