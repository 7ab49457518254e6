"""The rows of `baton bench kernels`: one module per kernel, each with `cases()`."""
