"""What KV is read and written by: rounding to float8, moves between pools, digests."""
