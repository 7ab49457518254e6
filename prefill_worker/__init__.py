"""The prefill role: chunked-prefill scheduler, worker loop, and its thin Ray actor."""
