"""Bookkeeping and memory of KV blocks: allocator, layout, pool."""
