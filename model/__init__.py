"""Models and their drafters: what layers compute, readable for one device; which ranks have which part of a tensor."""
