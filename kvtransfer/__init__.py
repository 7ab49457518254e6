"""The hand-off of KV blocks from prefill to decode: protocol (no I/O), transports, KV sender and KV receiver."""
