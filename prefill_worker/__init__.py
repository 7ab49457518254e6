"""The prefill role: worker loop, order of hand-offs, gRPC service, and a thin Ray actor."""
