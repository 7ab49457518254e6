"""CUDA graphs of steps, and the kernels compiled before a worker is ready."""
