"""The rows of `baton bench kernels`: one module for each kernel, each with `cases()`."""
