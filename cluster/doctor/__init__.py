"""What `baton doctor` looks at."""
