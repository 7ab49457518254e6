"""`/v1/completions`."""

from collections.abc import Sequence
from typing import Any, ClassVar

from baton.core.errors import ConflictingOptions, InvalidRequest, PromptTooLong
from baton.core.requests.request import GenerationRequest
from baton.core.requests.sampling import MAX_CHOICES
from baton.proto import inference_pb2
from baton.router.access.message_limits import check_num_answers
from baton.router.openai.completion_choice import CompletionChoice, PromptReport
from baton.router.openai.completion_request import DEFAULT_MAX_TOKENS, CompletionRequest, Prompt
from baton.router.openai.front import Forms, Front
from baton.router.openai.generation import Call, GenerationEndpoint
from baton.router.openai.token_names import TokenNames
from baton.router.openai.understood import Job, Understood


class CompletionCall(Call[CompletionRequest]):
    """One call, with a choice for each answer to each prompt."""

    object: ClassVar[str] = "text_completion"
    chunk_object: ClassVar[str] = "text_completion"
    default_max_tokens = DEFAULT_MAX_TOKENS

    def __init__(self, asked: CompletionRequest, front: Front, understood: Understood) -> None:
        self._asked = asked
        self._front = front
        self._names = TokenNames(front.model.tokenizer, as_ids=bool(asked.return_tokens_as_token_ids))
        self._prompts: list[PromptReport] = []
        self._choices: list[list[CompletionChoice]] = []
        self.id = f"cmpl-{understood.request_id}"
        self.requests, self.sampling = understood.requests, understood.sampling

    def begin(self, requests: Sequence[GenerationRequest]) -> None:
        """Make the choices."""
        num = self._asked.num_choices
        is_whole = self._asked.truncate_prompt_tokens is None
        for at, (given, request) in enumerate(zip(self.requests, requests, strict=True)):
            text = given.text if is_whole and given.HasField("text") else ""
            if self._asked.echo and not text:
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

    def call(self, asked: CompletionRequest, understood: Understood) -> CompletionCall:
        """The call that a body is."""
        return CompletionCall(asked, self.front, understood)


def understand_completion(asked: CompletionRequest, forms: Forms, job: Job) -> Understood:
    """What a body asks, in messages; their number is checked before any is made, and they share the sampling.

    Raises:
        InvalidRequest: it can be seen to be wrong.
    """
    if asked.echo and asked.logprobs is not None and asked.stream and asked.num_choices > 1:
        raise ConflictingOptions("echo with logprobs cannot be streamed with n > 1", field="stream")
    prompts = asked.prompts()
    check_num_answers(len(prompts) * min(max(1, asked.num_choices), MAX_CHOICES), job.max_answers)
    sampling = forms.with_defaults(asked.complete(asked.sampling(forms.encode)))
    requests = [_request(prompt, asked, job) for prompt in prompts]
    return Understood(asked=asked, request_id=job.request_id, requests=requests, sampling=sampling)


def _request(prompt: Prompt, asked: CompletionRequest, job: Job) -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest(
        model=asked.model or "",
        request_id=job.request_id,
        tenant=asked.cache_salt or "",
        priority=asked.turn,
        truncate_prompt_tokens=asked.truncate_prompt_tokens,
    )
    if isinstance(prompt, str):
        request.text = prompt
        return request
    if asked.truncate_prompt_tokens is not None:
        prompt = prompt[-job.max_model_len :]  # no more is read
    if len(prompt) > job.max_model_len:
        message = f"the prompt has {len(prompt)} tokens; the model's length is {job.max_model_len}"
        raise PromptTooLong(message, length=len(prompt), limit=job.max_model_len)
    try:
        request.token_ids.ids.extend(prompt)
    except ValueError as error:
        raise InvalidRequest(f"prompt: a token id is out of range: {error}", field="prompt") from error
    request.token_ids.SetInParent()
    return request
