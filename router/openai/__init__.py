"""The OpenAI-compatible HTTP API: the same requests, checks and errors as gRPC, in OpenAI's JSON."""
