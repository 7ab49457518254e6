"""Models and draft heads: what their layers compute, readable for one device, and each rank's part of a tensor."""
