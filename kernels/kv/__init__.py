"""Operations on stored KV: quantization to float8, moves between pools, digests."""
