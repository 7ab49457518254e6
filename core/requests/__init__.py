"""What a request asks for, and what its answer is made of."""
