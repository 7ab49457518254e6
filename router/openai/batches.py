"""`/v1/chat/completions/batch`, vLLM's: several conversations, which share all else."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Final

from pydantic import Field

from baton.core.errors import ConflictingOptions, InvalidRequest
from baton.core.requests.request import GenerationRequest
from baton.proto import inference_pb2
from baton.router.openai.chat_request import ChatRequest, Message, data_of
from baton.router.openai.chats import ALL_THAT_FIT, ChatCall, Chats, chat_prompt, understand_prompts
from baton.router.openai.front import Forms, Front
from baton.router.openai.generation import Call
from baton.router.openai.limits import MAX_MESSAGES, MAX_PROMPTS
from baton.router.openai.understood import Job, Understood

MAX_CHARS: Final = 16 << 20  # of all prompts: the tools are in each of them, and once in the body
Conversation = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class BatchRequest(ChatRequest):
    """What it asks."""

    nothing_said: ClassVar[list[Any]] = [ChatRequest.nothing_said]

    messages: list[Conversation] = Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)  # type: ignore[assignment]


class BatchCall(Call[ChatRequest]):
    """One call: a chat for each conversation."""

    object: ClassVar[str] = "chat.completion"
    default_max_tokens = ALL_THAT_FIT

    def __init__(self, asked: ChatRequest, front: Front, understood: Understood) -> None:
        num = asked.num_choices
        self._chats = [ChatCall(asked, front, understood, at * num) for at in range(len(understood.requests))]
        self.id = self._chats[0].id
        self.requests, self.sampling = understood.requests, understood.sampling

    def begin(self, requests: Sequence[GenerationRequest]) -> None:
        """Make the choices."""
        for chat, request in zip(self._chats, requests, strict=True):
            chat.begin([request])

    def add(self, at: int, chunk: inference_pb2.GenerateChunk) -> None:
        """Take a chunk for `whole`."""
        self._chats[at].add(0, chunk)

    def whole(self) -> dict[str, Any]:
        """The choices in order."""
        choices = [choice for chat in self._chats for choice in chat.whole()["choices"]]
        return {"choices": choices, "prompt_logprobs": None, "prompt_token_ids": None}

    def reasoning_tokens(self) -> int | None:
        """Of all choices."""
        counts = [count for chat in self._chats if (count := chat.reasoning_tokens()) is not None]
        return sum(counts) if counts else None


class Batches(Chats):
    """The endpoint."""

    kind = BatchRequest

    def call(self, asked: ChatRequest, understood: Understood) -> Call[ChatRequest]:  # type: ignore[override]
        """The call that a body is."""
        return BatchCall(asked, self.front, understood)


def understand_batch(asked: BatchRequest, forms: Forms, job: Job) -> Understood:
    """What a body asks, in messages, one for each conversation.

    Raises:
        InvalidRequest: it can be seen to be wrong.
    """
    for name in ("stream", "prompt_logprobs"):
        if getattr(asked, name) not in (None, False):
            raise ConflictingOptions(f"{name} is not for batches", field=name)
    return understand_prompts(asked, forms, job, len(asked.messages), lambda: _prompts(asked, forms))


def _prompts(asked: BatchRequest, forms: Forms) -> list[str]:
    prompts: list[str] = []
    num_chars = 0
    conversations: Sequence[Any] = asked.messages
    for at, conversation in enumerate(conversations):
        prompts.append(chat_prompt(asked, forms, data_of(conversation, f"messages[{at}]")))
        num_chars += len(prompts[-1])
        if num_chars > MAX_CHARS:
            raise InvalidRequest(
                f"the prompts have more than {MAX_CHARS} characters", field="messages", limit=MAX_CHARS
            )
    return prompts
