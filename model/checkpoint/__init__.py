"""What a directory of weights holds: its files and names, whether they are whole and fit, and how they are read."""
