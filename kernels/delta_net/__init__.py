"""The gated delta net, a recurrence that replaces attention in some layers, and the short convolution before it."""
