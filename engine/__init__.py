"""One worker's steps on tensors: batches, prefill and decode steps, sampling, verification; no sockets, no Ray."""
