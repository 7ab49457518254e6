"""Attention over paged KV: decode rows and prefill chunks, in all numerics."""
