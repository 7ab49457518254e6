"""What the prefill and decode roles share: loop thread, gRPC host, heartbeats, loading; neither role's logic."""
