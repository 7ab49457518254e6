"""`/v1/chat/completions`."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final

from pydantic import BaseModel

from baton.core.errors import ConflictingOptions, InvalidRequest
from baton.core.requests.answer_structure import Calls, Thought
from baton.core.requests.request import GenerationRequest
from baton.core.requests.sampling import MAX_CHOICES
from baton.proto import inference_pb2
from baton.router.access.message_limits import check_num_answers
from baton.router.openai.answer_form import bind, is_open, thought_of, tool_use
from baton.router.openai.call_reader import CallReader
from baton.router.openai.chat_choice import ChatChoice
from baton.router.openai.chat_request import ChatRequest, NamedToolChoice
from baton.router.openai.front import Forms, Front
from baton.router.openai.generation import Call, GenerationEndpoint
from baton.router.openai.reasoning import ReasoningSplitter
from baton.router.openai.tagged_call_reader import EitherCallReader
from baton.router.openai.token_names import TokenNames
from baton.router.openai.tool_calls import TaggedCalls
from baton.router.openai.understood import Job, Understood

ALL_THAT_FIT: Final = (1 << 31) - 1


class ChatCall(Call[ChatRequest]):
    """One call: a prompt that a template has written, and a choice for each answer."""

    object: ClassVar[str] = "chat.completion"
    chunk_object: ClassVar[str] = "chat.completion.chunk"
    default_max_tokens = ALL_THAT_FIT

    def __init__(self, asked: ChatRequest, front: Front, understood: Understood, first_index: int = 0) -> None:
        self._asked = asked
        self._first_index = first_index
        self._names = TokenNames(front.model.tokenizer, as_ids=bool(asked.return_tokens_as_token_ids))
        self._choices: list[ChatChoice] = []
        self._prompt_reports: list[inference_pb2.TokenLogprobs] = []
        self._prompt_token_ids: Sequence[int] = ()
        self._template = front.config.template
        self.id = f"chatcmpl-{understood.request_id}"
        self._understood = understood
        self.requests, self.sampling = understood.requests, understood.sampling

    def begin(self, requests: Sequence[GenerationRequest]) -> None:
        """Make the choices."""
        self._prompt_token_ids = requests[0].prompt_token_ids
        self._choices = [self._choice(self._first_index + at) for at in range(self._asked.num_choices)]

    def first(self) -> list[dict[str, Any]]:
        """Whose turn it is, once for each choice."""
        choices = [choice.first() for choice in self._choices]
        if self._asked.return_token_ids:
            choices[0]["prompt_token_ids"] = list(self._prompt_token_ids)
        return choices

    def push(self, at: int, chunk: inference_pb2.GenerateChunk) -> list[dict[str, Any]]:
        """At most one choice."""
        if chunk.prompt_logprobs:
            return []
        piece = self._choices[chunk.choice].push(chunk)
        return [] if piece is None else [piece]

    def add(self, at: int, chunk: inference_pb2.GenerateChunk) -> None:
        """Take a chunk for `whole`."""
        if chunk.prompt_logprobs:
            self._prompt_reports.extend(chunk.prompt_logprobs)
        else:
            self._choices[chunk.choice].add(chunk)

    def whole(self) -> dict[str, Any]:
        """The choices in order, and what was asked of the prompt."""
        asked = self._asked
        report = None if asked.prompt_logprobs is None else [None, *map(self._names.by_id, self._prompt_reports)]
        return {
            "choices": [choice.whole() for choice in self._choices],
            "prompt_logprobs": report,
            "prompt_token_ids": list(self._prompt_token_ids) if asked.return_token_ids else None,
        }

    def reasoning_tokens(self) -> int | None:
        """Of all choices."""
        counts = [choice.reasoning_tokens for choice in self._choices]
        return (
            sum(count for count in counts if count is not None) if any(count is not None for count in counts) else None
        )

    def _choice(self, index: int) -> ChatChoice:
        asked = self._asked
        template = self._template
        is_open, schemas = self._understood.is_open, self._understood.schemas
        reads_tags = template is not None and template.calls_have_tags
        understood = self._understood
        tools = TaggedCalls((lambda: EitherCallReader(schemas)) if reads_tags else CallReader)
        return ChatChoice(
            index,
            asked,
            self._names,
            reasoning=ReasoningSplitter(is_open=is_open) if understood.splits_thought else None,
            tools=tools if understood.splits_calls else None,
            calls_finish=not isinstance(asked.tool_choice, NamedToolChoice),
        )


class Chats(GenerationEndpoint[ChatRequest]):
    """The endpoint."""

    kind: type[BaseModel] = ChatRequest

    def call(self, asked: ChatRequest, understood: Understood) -> ChatCall:
        """The call that a body is."""
        return ChatCall(asked, self.front, understood)


def understand_chat(asked: ChatRequest, forms: Forms, job: Job) -> Understood:
    """What a body asks, in messages.

    Raises:
        InvalidRequest: it can be seen to be wrong.
    """
    return understand_prompts(asked, forms, job, 1, lambda: [chat_prompt(asked, forms, asked.message_data())])


def understand_prompts(
    asked: ChatRequest, forms: Forms, job: Job, num_prompts: int, write: Callable[[], Sequence[str]]
) -> Understood:
    """The same for any number of prompts, which share all else.

    Args:
        asked: all else.
        forms: the template among them.
        job: what is known beside it.
        num_prompts: that there will be.
        write: makes them, once it is known that so many may be.

    Raises:
        InvalidRequest: it can be seen to be wrong.
    """
    check_num_answers(num_prompts * min(max(1, asked.num_choices), MAX_CHOICES), job.max_answers)
    sampling = forms.with_defaults(asked.complete(asked.sampling(forms.encode)))
    use = tool_use(asked)
    prompts = write()
    thought = thought_of(asked, prompts[0], forms.template)
    if any(thought_of(asked, prompt, forms.template) is not thought for prompt in prompts):
        raise ConflictingOptions("some of the answers begin with a thought and others do not", field="messages")
    tagged = forms.template is not None and forms.template.calls_have_tags
    sampling = bind(sampling, use, thought, tagged=tagged)
    thinks = forms.template is not None and forms.template.thinks
    requests = [
        inference_pb2.GenerateRequest(
            model=asked.model or "",
            text=prompt,
            request_id=job.request_id,
            tenant=asked.cache_salt or "",
            priority=asked.turn,
            truncate_prompt_tokens=asked.truncate_prompt_tokens,
        )
        for prompt in prompts
    ]
    return Understood(
        asked=asked,
        request_id=job.request_id,
        requests=requests,
        sampling=sampling,
        is_open=is_open(prompts[0]),
        splits_thought=thinks and (thought is not Thought.NONE or not sampling.HasField("grammar")),
        splits_calls=use.calls is not Calls.NONE,
        schemas={one.name: one.parameters or {} for one in use.functions} if job.keeps_schemas else {},
    )


def chat_prompt(asked: ChatRequest, forms: Forms, messages: list[dict[str, Any]]) -> str:
    """The text of a chat's prompt.

    Args:
        asked: what the template reads beside the conversation.
        forms: the template among them.
        messages: the conversation.

    Raises:
        InvalidRequest: a message is none, or the template refuses the conversation.
    """
    template = forms.template
    if template is None:
        message = f"{forms.name} has no chat template; the operator can name one with --chat-template"
        raise InvalidRequest(message, field="messages")
    tools = None if asked.tool_choice == "none" or not asked.tools else [tool.as_data() for tool in asked.tools]
    variables = dict(asked.chat_template_kwargs or {})
    if asked.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", asked.reasoning_effort)
        if asked.reasoning_effort == "none":
            variables.setdefault("enable_thinking", False)

    return template.render(
        messages,
        tools,
        add_generation_prompt=asked.add_generation_prompt is not False,
        continue_final_message=asked.continue_final_message is True,
        variables=variables,
    )
