"""From logits to tokens: edits, cuts, noise, verification of drafts, log-probabilities."""
