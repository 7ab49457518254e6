"""The decode worker's end of the hand-off."""
