"""MoE layers: routing, assignment of rows to ranks, grouped GEMMs."""
