"""The decode role: continuous-batching scheduler, worker loop, and its thin Ray actor."""
