"""The hand-off of KV blocks from prefill to decode: protocol (sans I/O), transports, async writer, transfer."""
