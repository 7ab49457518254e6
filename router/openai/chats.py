"""`/v1/chat/completions`."""

from collections.abc import Sequence
from typing import Any, ClassVar, Final

from baton.core.errors import ConflictingOptions, InvalidRequest
from baton.core.request import GenerationRequest
from baton.core.sampling import MAX_CHOICES
from baton.proto import inference_pb2
from baton.router.message_limits import check_num_answers
from baton.router.openai import forced_tools
from baton.router.openai.call_reader import CallReader
from baton.router.openai.chat_choice import ChatChoice
from baton.router.openai.chat_request import ChatRequest, Function, NamedToolChoice
from baton.router.openai.front import Forms, Front
from baton.router.openai.generation import Call, GenerationEndpoint
from baton.router.openai.reasoning import CLOSE, OPEN, ReasoningSplitter
from baton.router.openai.tagged_call_reader import TaggedCallReader
from baton.router.openai.token_names import TokenNames
from baton.router.openai.tool_calls import ForcedCalls, TaggedCalls
from baton.router.openai.understood import Job, Understood

ALL_THAT_FIT: Final = (1 << 31) - 1


class ChatCall(Call[ChatRequest]):
    """One call: a prompt that a template has written, and a choice for each answer."""

    object: ClassVar[str] = "chat.completion"
    chunk_object: ClassVar[str] = "chat.completion.chunk"
    default_max_tokens = ALL_THAT_FIT

    def __init__(self, asked: ChatRequest, front: Front, understood: Understood) -> None:
        self._asked = asked
        self._names = TokenNames(front.model.tokenizer, as_ids=bool(asked.return_tokens_as_token_ids))
        self._choices: list[ChatChoice] = []
        self._prompt_reports: list[inference_pb2.TokenLogprobs] = []
        self._prompt_token_ids: Sequence[int] = ()
        self._template = front.config.template
        self.id = f"chatcmpl-{understood.request_id}"
        self._understood = understood
        self.requests, self.sampling = understood.requests, understood.sampling
        self._has_grammar = self.sampling.HasField("grammar")

    def begin(self, requests: Sequence[GenerationRequest]) -> None:
        """Make the choices."""
        self._prompt_token_ids = requests[0].prompt_token_ids
        self._choices = [self._choice(index) for index in range(self._asked.num_choices)]

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
        thinks = template is not None and template.thinks
        reads_tags = template is not None and template.calls_have_tags
        tagged = TaggedCalls((lambda: TaggedCallReader(schemas)) if reads_tags else CallReader)
        splits_tools = self._understood.has_tools and asked.tool_choice != "none" and not self._has_grammar
        return ChatChoice(
            index,
            asked,
            self._names,
            reasoning=ReasoningSplitter(is_open=is_open) if thinks and not self._has_grammar else None,
            tools=ForcedCalls() if self._understood.is_forced else tagged if splits_tools else None,
            calls_finish=not isinstance(asked.tool_choice, NamedToolChoice),
        )


class Chats(GenerationEndpoint[ChatRequest]):
    """The endpoint."""

    kind = ChatRequest

    def call(self, asked: ChatRequest, understood: Understood) -> ChatCall:
        """The call that a body is."""
        return ChatCall(asked, self.front, understood)


def understand_chat(asked: ChatRequest, forms: Forms, job: Job) -> Understood:
    """What a body asks, in messages.

    Raises:
        InvalidRequest: it can be seen to be wrong.
    """
    check_num_answers(min(max(1, asked.num_choices), MAX_CHOICES), job.max_answers)
    sampling = forms.with_defaults(asked.complete(asked.sampling(forms.encode)))
    forced = forced_schema(asked)
    if forced is not None:
        if sampling.HasField("grammar"):
            raise ConflictingOptions("a forced tool call has a format of its own", field="tool_choice")
        sampling.grammar.json_schema = forced
    prompt = chat_prompt(asked, forms)
    if sampling.HasField("grammar") and _is_thinking(prompt):
        prompt = f"{prompt.rstrip()}\n\n{CLOSE}\n\n"  # a grammar leaves no room for thoughts
    request = inference_pb2.GenerateRequest(
        model=asked.model or "",
        text=prompt,
        request_id=job.request_id,
        tenant=asked.cache_salt or "",
        priority=asked.turn,
        truncate_prompt_tokens=asked.truncate_prompt_tokens,
    )
    return Understood(
        asked=asked,
        request_id=job.request_id,
        requests=[request],
        sampling=sampling,
        is_forced=forced is not None,
        is_open=_is_thinking(prompt),
        has_tools=bool(asked.tools),
        schemas={one.name: one.parameters or {} for one in _functions(asked)} if job.keeps_schemas else {},
    )


def chat_prompt(asked: ChatRequest, forms: Forms) -> str:
    """The text of a chat's prompt.

    Raises:
        InvalidRequest: a message is none, or the template refuses the conversation.
    """
    template = forms.template
    if template is None:
        message = f"{forms.name} has no chat template; the operator can name one with --chat-template"
        raise InvalidRequest(message, field="messages")
    messages = asked.message_data()
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


def forced_schema(asked: ChatRequest) -> str | None:
    """The JSON Schema of an answer that must be a tool call; None where it need not.

    Raises:
        InvalidRequest: a choice among no tools, or of one that is not there.
    """
    choice = asked.tool_choice
    if choice is None or isinstance(choice, str):
        if choice != "required":
            return None
        if not asked.tools:
            raise InvalidRequest("tool_choice is required, and there are no tools", field="tool_choice")
        return forced_tools.some_calls(_functions(asked), parallel=asked.parallel_tool_calls is not False)
    named = [function for function in _functions(asked) if function.name == choice.function.name]
    if not named:
        raise InvalidRequest(f"tool_choice: no tool is named {choice.function.name[:64]!r}", field="tool_choice")
    return forced_tools.one_call(named[:1])


def _functions(asked: ChatRequest) -> list[Function]:
    return [tool.function for tool in asked.tools or ()]


def _is_thinking(prompt: str) -> bool:
    return prompt.rstrip().endswith(OPEN)
