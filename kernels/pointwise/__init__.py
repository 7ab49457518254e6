"""What is computed of each row by itself between products: norms, rotation, gates."""
