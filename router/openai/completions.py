"""`/v1/completions`."""

from collections.abc import Sequence
from typing import Any, ClassVar

from baton.core.errors import ConflictingOptions, InvalidRequest
from baton.core.request import GenerationRequest
from baton.proto import inference_pb2
from baton.router.openai.completion_choice import CompletionChoice, PromptReport
from baton.router.openai.completion_request import DEFAULT_MAX_TOKENS, CompletionRequest, Prompt
from baton.router.openai.front import Front
from baton.router.openai.generation import Call, GenerationEndpoint
from baton.router.openai.token_names import TokenNames


class CompletionCall(Call[CompletionRequest]):
    """One call, with a choice for each answer to each prompt."""

    object: ClassVar[str] = "text_completion"
    chunk_object: ClassVar[str] = "text_completion"
    default_max_tokens = DEFAULT_MAX_TOKENS

    def __init__(self, asked: CompletionRequest, front: Front, request_id: str) -> None:
        self._asked = asked
        self._front = front
        self._names = TokenNames(front.model.tokenizer, as_ids=bool(asked.return_tokens_as_token_ids))
        self._prompts: list[PromptReport] = []
        self._choices: list[list[CompletionChoice]] = []
        self._given = asked.prompts()
        self.id = f"cmpl-{request_id}"
        sampling = asked.complete(asked.sampling(front.model.tokenizer.encode))
        front.with_defaults(sampling)
        self.requests = [_request(prompt, asked, sampling, request_id=request_id) for prompt in self._given]

    def begin(self, requests: Sequence[GenerationRequest]) -> None:
        """Make the choices."""
        num = self._asked.num_choices
        for at, (given, request) in enumerate(zip(self._given, requests, strict=True)):
            if isinstance(given, str) and self._asked.truncate_prompt_tokens is None:
                text = given
            else:
                text = self._front.model.tokenizer.decode(request.prompt_token_ids)
            prompt = PromptReport(request, text)
            self._prompts.append(prompt)
            self._choices.append(
                [CompletionChoice(at * num + choice, self._asked, prompt, self._names) for choice in range(num)]
            )

    def push(self, at: int, chunk: inference_pb2.GenerateChunk) -> list[dict[str, Any]]:
        """At most one choice."""
        if chunk.prompt_logprobs:
            self._prompts[at].reports.extend(chunk.prompt_logprobs)
            return []
        piece = self._choices[at][chunk.choice].push(chunk)
        return [] if piece is None else [piece]

    def add(self, at: int, chunk: inference_pb2.GenerateChunk) -> None:
        """Take a chunk for `whole`."""
        if chunk.prompt_logprobs:
            self._prompts[at].reports.extend(chunk.prompt_logprobs)
        else:
            self._choices[at][chunk.choice].add(chunk)

    def whole(self) -> dict[str, Any]:
        """The choices in order."""
        return {"choices": [choice.whole() for choices in self._choices for choice in choices]}


class Completions(GenerationEndpoint[CompletionRequest]):
    """The endpoint."""

    kind = CompletionRequest

    async def understand(self, asked: CompletionRequest, request_id: str) -> CompletionCall:
        """Make a call of a body.

        Raises:
            InvalidRequest: it can be seen to be wrong.
        """
        if asked.echo and asked.logprobs is not None and asked.stream and asked.num_choices > 1:
            message = "echo with logprobs cannot be streamed with n > 1"
            raise ConflictingOptions(message, field="stream")
        return CompletionCall(asked, self.front, request_id)


def _request(
    prompt: Prompt, asked: CompletionRequest, sampling: inference_pb2.Sampling, request_id: str
) -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest(
        model=asked.model or "",
        sampling=sampling,
        request_id=request_id,
        tenant=asked.cache_salt or "",
        priority=asked.turn,
        truncate_prompt_tokens=asked.truncate_prompt_tokens,
    )
    if isinstance(prompt, str):
        request.text = prompt
        return request
    try:
        request.token_ids.ids.extend(prompt)
    except ValueError as error:
        raise InvalidRequest(f"prompt: a token id is out of range: {error}", field="prompt") from error
    request.token_ids.SetInParent()
    return request
