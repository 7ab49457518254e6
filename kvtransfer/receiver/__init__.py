"""The decode worker's side of the hand-off."""
