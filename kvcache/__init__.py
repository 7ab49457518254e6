"""Bookkeeping and memory of KV blocks: allocator, prefix index, layout and pool."""
