"""The OpenAI-compatible HTTP front door: the same requests, checks and errors as gRPC, in OpenAI's JSON."""
