"""One worker's steps on tensors: batches, prefill and decode steps, sampling, verification, ranks; no Ray."""
