"""The body of `/v1/completions`."""

from typing import Final

from pydantic import Field

from baton.core.errors import EmptyPrompt, InvalidSampling
from baton.proto import inference_pb2
from baton.router.openai.limits import ManyTokenIds, Text, Texts, TokenIds
from baton.router.openai.options import Options

DEFAULT_MAX_TOKENS: Final = 16  # OpenAI's
Prompt = str | list[int]


class CompletionRequest(Options):
    """What it asks."""

    prompt: Text | TokenIds | Texts | ManyTokenIds | None = Field(None, union_mode="left_to_right")
    echo: bool | None = None
    logprobs: int | None = None

    def prompts(self) -> list[Prompt]:
        """Each prompt by itself.

        Raises:
            EmptyPrompt: there is none.
        """
        asked = self.prompt
        if not asked:
            raise EmptyPrompt("prompt is missing or empty", field="prompt")
        if isinstance(asked, str):
            return [asked]
        ids = [item for item in asked if isinstance(item, int)]
        return [ids] if ids else [item for item in asked if not isinstance(item, int)]

    @property
    def echoes_only(self) -> bool:
        """Whether only the prompt is wanted back."""
        return bool(self.echo) and self.max_tokens == 0

    def complete(self, sampling: inference_pb2.Sampling) -> inference_pb2.Sampling:
        """Add what only this kind of request has.

        Raises:
            InvalidSampling: a number of log-probabilities that no message can carry.
        """
        if self.echoes_only:
            sampling.max_tokens = 1  # it is made, and not shown
        if self.logprobs is not None:
            if not 0 <= self.logprobs < 1 << 31:
                raise InvalidSampling(f"logprobs = {self.logprobs}: out of range", field="logprobs")
            sampling.logprobs = self.logprobs
            if self.echo and self.prompt_logprobs is None:
                sampling.prompt_logprobs = self.logprobs
        return sampling
