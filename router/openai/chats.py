"""`/v1/chat/completions` and its batch form: choices and replies, streamed or whole."""

import secrets
import string
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BaseModel, Field

from baton.core.errors import ConflictingOptions, InvalidRequest, InvalidText
from baton.core.requests.answer_structure import (
    JSON_OBJECT,
    AnswerStructure,
    CallableTool,
    CallForm,
    Calls,
    Thought,
    ThoughtForm,
)
from baton.core.requests.request import GenerationRequest
from baton.core.requests.sampling import MAX_CHOICES
from baton.proto import inference_pb2
from baton.router.access.message_limits import check_num_answers
from baton.router.openai.chat_request import (
    AllowedToolsChoice,
    ChatRequest,
    Function,
    Message,
    NamedToolChoice,
    data_of,
)
from baton.router.openai.chat_template import ChatTemplate
from baton.router.openai.completions import stop_reason_of, timings_of
from baton.router.openai.front import Forms, Front
from baton.router.openai.generation import Call, GenerationEndpoint
from baton.router.openai.limits import MAX_MESSAGES, MAX_PROMPTS
from baton.router.openai.reasoning import ReasoningCount, ReasoningSplitter
from baton.router.openai.token_names import TokenNames
from baton.router.openai.tool_calls import CallParts, Splitter, calls_of
from baton.router.openai.understood import ReadingJob, Understood

_FIELD: Final = "tool_choice"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The combined meaning of `tools` and `tool_choice`.

    Attributes:
        calls: whether the answer may, must or must not contain calls.
        functions: functions that may be called.
        is_restricted: whether some of the tools may not be called.
        parallel: whether more than one call is allowed.
    """

    calls: Calls
    functions: Sequence[Function] = ()
    is_restricted: bool = False
    parallel: bool = True


def tool_use(asked: ChatRequest) -> ToolUse:
    """Decide which calls a request allows.

    Raises:
        InvalidRequest: a call is required without tools, or `tool_choice` names an unknown tool.
    """
    choice, functions = asked.tool_choice, [tool.function for tool in asked.tools or ()]
    parallel = asked.parallel_tool_calls is not False
    if isinstance(choice, NamedToolChoice):
        named = _named(functions, [choice.function.name])
        return ToolUse(calls=Calls.REQUIRED, functions=named[:1], parallel=False)
    if isinstance(choice, AllowedToolsChoice):
        allowed = _named(functions, [tool.function.name for tool in choice.allowed_tools.tools])
        return ToolUse(
            calls=Calls(choice.allowed_tools.mode),
            functions=allowed,
            is_restricted=len(allowed) < len(functions),
            parallel=parallel,
        )
    if choice == "required" and not functions:
        raise InvalidRequest("tool_choice is required, and there are no tools", field=_FIELD)
    if choice == "none" or not functions:
        return ToolUse(calls=Calls.NONE)
    calls = Calls.REQUIRED if choice == "required" else Calls.AUTO
    return ToolUse(calls=calls, functions=functions, parallel=parallel)


def thought_of(asked: ChatRequest, prompt: str, template: ChatTemplate | None) -> Thought:
    """Whether the answer to a prompt begins with a thought."""
    form = None if template is None else template.thought_form
    if form is None:
        return Thought.NONE
    if prompt.rstrip().endswith(form):
        return Thought.OPEN
    is_over = asked.continue_final_message or prompt.rstrip().endswith(form.end)
    return Thought.NONE if is_over else Thought.OPTIONAL


def bind(sampling: inference_pb2.Sampling, use: ToolUse, thought: Thought, forms: Forms) -> inference_pb2.Sampling:
    """Add the grammar of calls and text format to the sampling, if either is binding; thoughts stay unconstrained.

    Args:
        sampling: its grammar is the text format.
        use: which calls are allowed.
        thought: whether a thought comes first.
        forms: how the model writes calls and thoughts.

    Raises:
        InvalidText: a tool's schema is not valid Unicode.
    """
    has_format = sampling.HasField("grammar")
    is_strict = any(function.strict for function in use.functions)
    if use.calls is Calls.NONE and (not has_format or thought is Thought.NONE):
        return sampling
    if use.calls is Calls.AUTO and not (has_format or use.is_restricted or is_strict):
        return sampling
    is_required = use.calls is Calls.REQUIRED
    call_form, thought_form = _written(forms.template)
    marks = {
        *(call_form.marks if use.calls is not Calls.NONE else ()),
        *(thought_form.marks if thought is not Thought.NONE else ()),
    }
    structure = AnswerStructure(
        thought=thought,
        thought_form=thought_form,
        calls=use.calls,
        form=call_form,
        tokens={mark: token_id for mark, token_id in forms.marks.items() if mark in marks},
        tools=tuple(
            CallableTool(function.name, function.arguments_schema if function.strict or is_required else None)
            for function in use.functions
        ),
        parallel=use.parallel,
        text=_format(sampling.grammar) if has_format and not is_required else None,
    )
    try:
        sampling.grammar.structure = structure.to_json()
    except UnicodeEncodeError as error:
        raise InvalidText(f"tools: not valid UTF-8 at character {error.start}", field="tools") from error
    return sampling


def _written(template: ChatTemplate | None) -> tuple[CallForm, ThoughtForm]:
    """How a model writes calls and thoughts; the usual forms if it has no template."""
    if template is None:
        return CallForm.HERMES, ThoughtForm.TAGS
    return template.call_form, template.thought_form or ThoughtForm.TAGS


def _format(grammar: inference_pb2.Grammar) -> tuple[str, str]:
    kind = grammar.WhichOneof("form") or JSON_OBJECT
    return kind, "" if kind == JSON_OBJECT else getattr(grammar, kind)


def _named(functions: Sequence[Function], names: Sequence[str]) -> list[Function]:
    known = {function.name for function in functions}
    missing = next((name for name in names if name not in known), None)
    if missing is not None:
        raise InvalidRequest(f"tool_choice: no tool is named {missing[:64]!r}", field=_FIELD)
    return [function for function in functions if function.name in names]


def call_id(form: CallForm) -> str:
    """Make an id for a call; Mistral's templates accept only nine letters and digits."""
    if form in (CallForm.MISTRAL, CallForm.MISTRAL_ARGS):
        return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))
    return f"call_{secrets.token_hex(12)}"


_ALPHANUMERIC: Final = string.ascii_letters + string.digits
Delta = dict[str, Any]
THOUGHTS: Final = ("reasoning", "reasoning_content")  # vLLM's name, and its older one
_NOTHING_ELSE: Final[Delta] = dict.fromkeys(("refusal", "annotations", "audio", "function_call"))


class ChatChoice:
    """One of `choices`.

    Args:
        index: its index in the reply.
        asked: the request.
        names: names of tokens.
        reasoning: splits off thoughts; None leaves them in the text.
        tools: splits off tool calls; None leaves them in the text.
        calls_finish: whether an answer with calls finishes with `tool_calls` instead of `stop`.
        make_id: makes an id for a call for which the model wrote none.
        shows_special: whether special tokens are part of the text, including those around thoughts and calls.
    """

    def __init__(
        self,
        index: int,
        asked: ChatRequest,
        names: TokenNames,
        *,
        reasoning: ReasoningSplitter | None = None,
        tools: Splitter | None = None,
        calls_finish: bool = True,
        make_id: Callable[[], str] = lambda: call_id(CallForm.HERMES),
        shows_special: bool = False,
    ) -> None:
        self._index = index
        self._asked = asked
        self._names = names
        self._reasoning = reasoning
        self._count = None
        if reasoning is not None:
            stream = names.stream(skip_special_tokens=not shows_special)
            self._count = ReasoningCount(stream, is_open=reasoning.is_open, form=reasoning.form)
        self._tools = tools
        self._calls_finish = calls_finish
        self._make_id = make_id
        self._written_ids: set[str] = set()
        self._has_calls = False
        self._content = ""
        self._thoughts = ""
        self._calls: list[dict[str, Any]] = []
        self._logprobs: list[dict[str, Any]] = []
        self._token_ids: list[int] = []
        self._finish_reason: str | None = None
        self._stop_reason: int | str | None = None
        self._timings: dict[str, Any] = {}

    @property
    def reasoning_tokens(self) -> int | None:
        """Tokens of the thoughts so far; None if none are split off."""
        return None if self._count is None else self._count.num_tokens

    @property
    def num_before_text(self) -> int:
        """Tokens of the thoughts and their tags, once the thoughts have ended."""
        return 0 if self._count is None else self._count.num_before_text

    def first(self) -> dict[str, Any]:
        """The choice in a stream's first event."""
        return self._piece({"role": "assistant", "content": ""}, None, None)

    def push(self, chunk: inference_pb2.GenerateChunk) -> dict[str, Any] | None:
        """Return what a chunk adds to the stream; None if it adds nothing."""
        is_last = chunk.HasField("finish")
        if self._count is not None:
            self._count.push(chunk.token_ids)
        delta = self._delta(chunk.text, is_last=is_last)
        logprobs = None
        if self._asked.logprobs:
            num_top = self._asked.top_logprobs or 0
            logprobs = {"content": [self._names.report(report, num_top) for report in chunk.logprobs], "refusal": None}
        finish_reason = self._reason(chunk.finish.reason) if is_last else None
        says_ids = self._asked.return_token_ids and chunk.token_ids
        if not (delta or finish_reason or says_ids or (logprobs and logprobs["content"])):
            return None
        piece = self._piece(delta, logprobs, finish_reason)
        if is_last:
            piece["stop_reason"] = stop_reason_of(chunk)
        if self._asked.return_token_ids:
            piece["token_ids"] = list(chunk.token_ids)
        return piece | timings_of(chunk) if self._asked.return_timings else piece

    def add(self, chunk: inference_pb2.GenerateChunk) -> None:
        """Collect a chunk for `whole`."""
        piece = self.push(chunk)
        if piece is None:
            return
        delta = piece["delta"]
        self._content += delta.get("content", "")
        self._thoughts += delta.get("reasoning", "")
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(self._calls):
                self._calls.append({"id": call["id"], "type": "function", "function": dict(call["function"])})
            else:
                self._calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        if piece["logprobs"] is not None:
            self._logprobs += piece["logprobs"]["content"]
        self._token_ids += piece.get("token_ids", ())
        self._finish_reason = piece["finish_reason"]
        self._stop_reason = piece.get("stop_reason")
        self._timings = {name: piece[name] for name in ("timings",) if name in piece}

    def whole(self) -> dict[str, Any]:
        """Everything collected, as one choice."""
        message: dict[str, Any] = {"role": "assistant", "content": self._content, **_NOTHING_ELSE}
        if self._calls:
            message |= {"tool_calls": self._calls, "content": self._content or None}
        if self._reasoning is not None and self._asked.include_reasoning is not False:
            message |= dict.fromkeys(THOUGHTS, self._thoughts or None)
        logprobs = {"content": self._logprobs, "refusal": None} if self._asked.logprobs else None
        return {
            "index": self._index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": self._finish_reason,
            "stop_reason": self._stop_reason,
            "token_ids": self._token_ids if self._asked.return_token_ids else None,
            **self._timings,
        }

    def _delta(self, text: str, *, is_last: bool) -> Delta:
        reasoning = ""
        if self._reasoning is not None:
            reasoning, text = self._reasoning.push(text)
            if is_last:
                more_reasoning, more_text = self._reasoning.finish()
                reasoning, text = reasoning + more_reasoning, text + more_text
        delta: Delta = {}
        if reasoning and self._asked.include_reasoning is not False:
            delta |= dict.fromkeys(THOUGHTS, reasoning)
        if self._tools is None:
            return delta | ({"content": text} if text else {})
        self._merge(self._tools.push(text), delta)
        if is_last:
            self._merge(self._tools.finish(), delta)
        return delta

    def _merge(self, parts: CallParts, delta: Delta) -> None:
        if parts.content:
            delta["content"] = delta.get("content", "") + parts.content
        only_first = self._asked.parallel_tool_calls is False
        calls: dict[int, dict[str, Any]] = {call["index"]: call for call in delta.get("tool_calls", ())}
        for at, name in parts.begun:
            if at == 0 or not only_first:
                function = {"name": name, "arguments": ""}
                calls[at] = {"index": at, "id": self._id(parts.ids.get(at)), "type": "function", "function": function}
        for at, arguments in parts.arguments:
            if at == 0 or not only_first:
                call = calls.setdefault(at, {"index": at, "function": {"arguments": ""}})
                call["function"]["arguments"] += arguments
        if calls:
            self._has_calls = True
            delta["tool_calls"] = list(calls.values())

    def _id(self, written: str | None) -> str:
        """Return the id that the model wrote for a call, if it is unique; else a new one."""
        if written is None or written in self._written_ids:
            return self._make_id()
        self._written_ids.add(written)
        return written

    def _reason(self, reason: str) -> str:
        return "tool_calls" if reason == "stop" and self._has_calls and self._calls_finish else reason

    def _piece(self, delta: Delta, logprobs: dict[str, Any] | None, finish_reason: str | None) -> dict[str, Any]:
        return {"index": self._index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


@dataclass(frozen=True, slots=True)
class ChatStep:
    """One addition to the answer.

    Attributes:
        kind: a thought, text, the start of a call, or arguments of the call that started last.
        text: the added text.
        call: id and name of a call that starts.
    """

    kind: Literal["thought", "text", "call", "arguments"]
    text: str
    call: tuple[str, str] = ("", "")


def steps(delta: dict[str, Any]) -> Iterator[ChatStep]:
    """Split a choice's delta into steps. A call is complete before text follows it."""
    if delta.get("reasoning"):
        yield ChatStep("thought", delta["reasoning"])
    calls = delta.get("tool_calls", ())
    for call in calls:
        if "id" not in call:
            yield ChatStep("arguments", call["function"]["arguments"])
    if delta.get("content"):
        yield ChatStep("text", delta["content"])
    for call in calls:
        if "id" in call:
            yield ChatStep("call", "", (call["id"], call["function"]["name"]))
            if call["function"]["arguments"]:
                yield ChatStep("arguments", call["function"]["arguments"])


ALL_THAT_FIT: Final = (1 << 31) - 1


class ChatCall(Call[ChatRequest]):
    """One chat call: a prompt rendered by the template, and a choice for each answer."""

    object: ClassVar[str] = "chat.completion"
    chunk_object: ClassVar[str] = "chat.completion.chunk"
    named_call_finishes: ClassVar[bool] = False  # whether calls are the finish reason even of a named tool
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
        """Create the choices."""
        self._prompt_token_ids = requests[0].prompt_token_ids
        self._choices = [self._choice(self._first_index + at) for at in range(self._asked.num_choices)]

    def first(self) -> list[dict[str, Any]]:
        """One choice per answer that announces the assistant's role."""
        choices = [choice.first() for choice in self._choices]
        if self._asked.return_token_ids:
            choices[0]["prompt_token_ids"] = list(self._prompt_token_ids)
        return choices

    def push(self, at: int, chunk: inference_pb2.GenerateChunk) -> list[dict[str, Any]]:
        """Return at most one choice."""
        if chunk.prompt_logprobs:
            return []
        piece = self._choices[chunk.choice].push(chunk)
        return [] if piece is None else [piece]

    def add(self, at: int, chunk: inference_pb2.GenerateChunk) -> None:
        """Collect a chunk for `whole`."""
        if chunk.prompt_logprobs:
            self._prompt_reports.extend(chunk.prompt_logprobs)
        else:
            self._choices[chunk.choice].add(chunk)

    def whole(self) -> dict[str, Any]:
        """The choices in order, and the requested data about the prompt."""
        asked = self._asked
        report = None if asked.prompt_logprobs is None else [None, *map(self._names.by_id, self._prompt_reports)]
        return {
            "choices": [choice.whole() for choice in self._choices],
            "prompt_logprobs": report,
            "prompt_token_ids": list(self._prompt_token_ids) if asked.return_token_ids else None,
        }

    def reasoning_tokens(self) -> int | None:
        """Tokens of all choices' thoughts so far; None if none are split off."""
        counts = [choice.reasoning_tokens for choice in self._choices]
        return (
            sum(count for count in counts if count is not None) if any(count is not None for count in counts) else None
        )

    def _choice(self, index: int) -> ChatChoice:
        asked = self._asked
        understood = self._understood
        call_form, thought_form = _written(self._template)
        reasoning = ReasoningSplitter(is_open=understood.is_open, form=thought_form)
        sampling = understood.sampling
        return ChatChoice(
            index,
            asked,
            self._names,
            reasoning=reasoning if understood.splits_thought else None,
            tools=calls_of(call_form, understood.schemas) if understood.splits_calls else None,
            calls_finish=self.named_call_finishes or not isinstance(asked.tool_choice, NamedToolChoice),
            make_id=lambda: call_id(call_form),
            shows_special=sampling.HasField("skip_special_tokens") and not sampling.skip_special_tokens,
        )


class Chats(GenerationEndpoint[ChatRequest]):
    """Serves `/v1/chat/completions`."""

    kind: type[BaseModel] = ChatRequest

    def call(self, asked: ChatRequest, understood: Understood) -> ChatCall:
        """Make the call for a request."""
        return ChatCall(asked, self.front, understood)


def understand_chat(asked: ChatRequest, forms: Forms, job: ReadingJob) -> Understood:
    """Translate a request into messages for the workers.

    Raises:
        InvalidRequest: the request is invalid.
    """
    return understand_prompts(asked, forms, job, 1, lambda: [chat_prompt(asked, forms, asked.message_data())])


def understand_prompts(
    asked: ChatRequest, forms: Forms, job: ReadingJob, num_prompts: int, write: Callable[[], Sequence[str]]
) -> Understood:
    """Translate a request with any number of prompts, which share all other options.

    Args:
        asked: the options.
        forms: the chat template and other knowledge about the model.
        job: limits, and the request's id.
        num_prompts: number of prompts.
        write: renders the prompts; called once their number has been checked.

    Raises:
        InvalidRequest: the request is invalid.
    """
    check_num_answers(num_prompts * min(max(1, asked.num_choices), MAX_CHOICES), job.max_answers)
    sampling = forms.with_defaults(asked.complete(asked.sampling(forms.encode)))
    use = tool_use(asked)
    prompts = write()
    thought = thought_of(asked, prompts[0], forms.template)
    if any(thought_of(asked, prompt, forms.template) is not thought for prompt in prompts):
        raise ConflictingOptions("some of the answers begin with a thought and others do not", field="messages")
    sampling = bind(sampling, use, thought, forms)
    thinks = forms.template is not None and forms.template.thinks
    splits_thought = thinks and (thought is not Thought.NONE or not sampling.HasField("grammar"))
    splits_calls = use.calls is not Calls.NONE
    call_form, thought_form = _written(forms.template)
    marks = {*(thought_form.marks if splits_thought else ()), *(call_form.marks if splits_calls else ())}
    if not marks.isdisjoint(forms.hidden):
        sampling.skip_special_tokens = False  # otherwise the text would have no marks to split at
    requests = [
        inference_pb2.GenerateRequest(
            model=asked.model or "",
            text=prompt,
            request_id=job.request_id,
            tenant=asked.cache_salt or "",
            priority=asked.turn,
            truncate_prompt_tokens=asked.truncate_prompt_tokens,
            add_special_tokens=asked.add_special_tokens is True,  # the template writes the special tokens itself
        )
        for prompt in prompts
    ]
    return Understood(
        asked=asked,
        request_id=job.request_id,
        requests=requests,
        sampling=sampling,
        is_open=thought is Thought.OPEN,
        splits_thought=splits_thought,
        splits_calls=splits_calls,
        schemas={one.name: one.parameters or {} for one in use.functions} if job.keeps_schemas else {},
    )


def chat_prompt(asked: ChatRequest, forms: Forms, messages: list[dict[str, Any]]) -> str:
    """Render the prompt of a chat.

    Args:
        asked: options that the template reads besides the conversation.
        forms: has the chat template.
        messages: the conversation.

    Raises:
        InvalidRequest: a message is invalid, the template refuses the conversation, or its output is not valid Unicode.
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

    prompt = template.render(
        messages,
        tools,
        add_generation_prompt=asked.add_generation_prompt is not False,
        continue_final_message=asked.continue_final_message is True,
        variables=variables,
    )
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        message = f"the chat template wrote a prompt that is not valid UTF-8 at character {error.start}"
        raise InvalidText(message, field="messages") from error
    return prompt


MAX_CHARS: Final = 16 << 20  # over all prompts: each contains the tools, which the body has only once
Conversation = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class BatchRequest(ChatRequest):
    """What it asks."""

    nothing_said: ClassVar[list[Any]] = [ChatRequest.nothing_said]

    messages: list[Conversation] = Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)  # type: ignore[assignment]


class BatchCall(Call[ChatRequest]):
    """One batch call: a chat for each conversation."""

    object: ClassVar[str] = "chat.completion"
    default_max_tokens = ALL_THAT_FIT

    def __init__(self, asked: ChatRequest, front: Front, understood: Understood) -> None:
        num = asked.num_choices
        self._chats = [ChatCall(asked, front, understood, at * num) for at in range(len(understood.requests))]
        self.id = self._chats[0].id
        self.requests, self.sampling = understood.requests, understood.sampling

    def begin(self, requests: Sequence[GenerationRequest]) -> None:
        """Create the choices."""
        for chat, request in zip(self._chats, requests, strict=True):
            chat.begin([request])

    def add(self, at: int, chunk: inference_pb2.GenerateChunk) -> None:
        """Collect a chunk for `whole`."""
        self._chats[at].add(0, chunk)

    def whole(self) -> dict[str, Any]:
        """The choices of all conversations in order."""
        choices = [choice for chat in self._chats for choice in chat.whole()["choices"]]
        return {"choices": choices, "prompt_logprobs": None, "prompt_token_ids": None}

    def reasoning_tokens(self) -> int | None:
        """Tokens of all choices' thoughts so far; None if none are split off."""
        counts = [count for chat in self._chats if (count := chat.reasoning_tokens()) is not None]
        return sum(counts) if counts else None


class Batches(Chats):
    """Serves `/v1/chat/completions/batch`."""

    kind = BatchRequest

    def call(self, asked: ChatRequest, understood: Understood) -> Call[ChatRequest]:  # type: ignore[override]
        """Make the call for a request."""
        return BatchCall(asked, self.front, understood)


def understand_batch(asked: BatchRequest, forms: Forms, job: ReadingJob) -> Understood:
    """Translate a batch into messages for the workers, one for each conversation.

    Raises:
        InvalidRequest: the request is invalid.
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
