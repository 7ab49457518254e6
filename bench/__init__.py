"""What `baton bench` runs: measurements, their rows and their plots."""
