"""Attention over paged KV: of decode rows, of chunks of prompts, in every numerics."""
