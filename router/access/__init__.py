"""Who gets in, and how much each may take."""
