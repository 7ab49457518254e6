"""Row-wise operations between GEMMs: norms, RoPE, gates."""
