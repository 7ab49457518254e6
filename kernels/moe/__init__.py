"""A mixture of experts: who computes which rows, and the grouped products."""
