"""The gated delta net, a recurrence that stands in for attention, and the short convolution before it."""
