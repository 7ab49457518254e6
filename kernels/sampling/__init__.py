"""From logits to tokens: logit edits, truncation, noise, verification of drafts, log-probabilities."""
