"""The decode role: worker loop, gRPC service, and a thin Ray actor."""
