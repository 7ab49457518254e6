"""CUDA graphs of decode steps, and what is compiled before a worker is ready."""
