"""What one call has used: OpenAI's `usage`."""

from collections.abc import Callable, Sequence
from typing import Any

from baton.core.requests.request import GenerationRequest
from baton.proto import inference_pb2


class Usage:
    """Counts the tokens of a call as its chunks pass.

    Args:
        requests: of the call; a prompt counts once, however many answers it has.
        reasoning_tokens: those of the answers that are thoughts; None where none are split off.
    """

    def __init__(self, requests: Sequence[GenerationRequest], reasoning_tokens: Callable[[], int | None]) -> None:
        self._reasoning_tokens = reasoning_tokens
        self._prompt_tokens = sum(request.prompt_len for request in requests)
        self._cached = [0] * len(requests)
        self.completion_tokens = 0

    def add(self, at: int, chunk: inference_pb2.GenerateChunk) -> None:
        """A chunk of the `at`-th request."""
        self.completion_tokens += len(chunk.token_ids)
        if chunk.HasField("finish"):
            self._cached[at] = max(self._cached[at], chunk.finish.stats.num_cached_tokens)

    def as_data(self) -> dict[str, Any]:
        """As of now. Cached tokens are known at the end: those whose KV a prefill worker had already."""
        num_reasoning = self._reasoning_tokens()
        details = {} if num_reasoning is None else {"completion_tokens_details": {"reasoning_tokens": num_reasoning}}
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self._prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached)},
            **details,
        }
