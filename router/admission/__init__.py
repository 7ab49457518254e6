"""Which request goes to the workers next, who waits, and who is refused at once."""
