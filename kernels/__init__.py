"""The model's arithmetic: one function per operation, with a torch reference beside any faster implementation."""
