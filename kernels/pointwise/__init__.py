"""What is computed of each row by itself between GEMMs: norms, rotation, gates."""
