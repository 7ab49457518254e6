"""The prefill worker's side of the hand-off."""
