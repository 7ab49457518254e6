"""The prefill worker's end of the hand-off."""
