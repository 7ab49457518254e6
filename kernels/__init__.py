"""The arithmetic of the model: one function per operation, its torch reference beside any faster form."""
