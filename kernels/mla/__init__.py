"""Multi-head latent attention: all heads read one row of a position."""
