"""MoE layers: routing, which rank computes which rows, grouped GEMMs."""
