"""What the prefill and the decode role share: loop thread, gRPC host, heartbeats, loading; neither role's logic."""
