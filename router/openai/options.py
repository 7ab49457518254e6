"""Options common to completions and chats: OpenAI's fields, vLLM's additional ones, and those that are refused.

Types are strict: a number in quotes is not a number. `null` means absent, because clients send either. An unknown field
is no error, but the reply names it (`x-baton-ignored`).
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from baton.core.errors import ConflictingOptions, InvalidGrammar, InvalidRequest, InvalidSampling, InvalidText
from baton.core.requests.answer_structure import MAX_GRAMMAR_BYTES
from baton.core.requests.sampling import MAX_STOP_STRING_LEN, SCALAR_FIELDS
from baton.proto import inference_pb2
from baton.router.access.message_limits import MAX_TENANT_LEN
from baton.router.admission.admission import HIGH, LOW
from baton.router.openai.limits import (
    MAX_UNKNOWN,
    AllowedTokenIds,
    BadWords,
    Choices,
    GrammarText,
    JsonObject,
    LogitBias,
    Name,
    StopStrings,
    StopTokenIds,
)

SEED_MASK: Final = (1 << 63) - 1
LOW_INT64, HIGH_INT64 = -(1 << 63), (1 << 63) - 1
HIGH_INT32: Final = (1 << 31) - 1
MAX_TOP_LOGPROBS: Final = 20
MAX_NAMED: Final = 8  # maximum number of invalid keys that an error lists
STORELESS: Final = "nothing is stored here, so send the whole conversation"
# Any other value of these would change the answer in a way that is not supported.
REFUSED: Final[Mapping[str, tuple[tuple[Any, ...], str]]] = {
    "suffix": ((None, ""), "the models served here are not trained to fill a gap"),
    "use_beam_search": ((None, False), "there is no beam search"),
    "length_penalty": ((None, 1.0), "it belongs to beam search, which there is not"),
    "truncation_side": ((None, "left"), "truncate_prompt_tokens keeps the end of a prompt"),
    "prompt_embeds": ((None,), "prompts are text or token ids"),
    "logprob_token_ids": ((None,), "log-probabilities are those of the likeliest tokens"),
    "logits_processors": ((None, []), "requests bring no code"),
    "thinking_token_budget": ((None, -1), "only max_tokens limits thinking"),
    "repetition_detection": ((None,), "only stop, EOS and max_tokens end an answer"),
    "watermarking": ((None, False), "there is no watermark"),
    "ec_transfer_params": ((None, {}), "there is no encoder"),
    "kv_transfer_params": ((None, {}), "the router itself decides who hands over to whom"),
    "modalities": ((None, ["text"]), "answers are text"),
    "audio": ((None,), "answers are text"),
    "functions": ((None, []), "use tools"),
    "function_call": ((None, "none"), "use tool_choice"),
    "web_search_options": ((None,), "there is no web search"),
    "chat_template": ((None,), "the operator chooses the template (--chat-template)"),
    "echo": ((None, False), "chats are not echoed"),
    "structural_tag": ((None,), "say what the answer must be with response_format or structured_outputs"),
    "json_schema": ((None,), "use response_format, or structured_outputs.json"),
    "guided_json_object": ((None, False), "use response_format"),
    "guided_whitespace_pattern": ((None,), "the form of white space is not a request's choice"),
    "guided_decoding": ((None, {}), "use structured_outputs"),
    "format": ((None, ""), "use response_format"),
    "documents": ((None, []), "put them into a message"),
    "previous_response_id": ((None, ""), STORELESS),
    "conversation": ((None, ""), STORELESS),
    "thread": ((None,), STORELESS),
    "background": ((None, False), "an answer is returned to the call that asks for it"),
    "container": ((None,), "no tool runs on the server"),
    "mcp_servers": ((None, []), "no tool runs on the server"),
    "moderation": ((None,), "no model here moderates"),
    "compaction": ((None,), "ask for a summary in a message"),
}
# These do not affect the answer.
HARMLESS: Final = frozenset(
    "user store metadata service_tier safety_identifier prompt_cache_key prompt_cache_retention prediction verbosity "
    "spaces_between_special_tokens session_id guided_decoding_backend stream_interval "
    "mm_processor_kwargs media_io_kwargs".split()
)


# An unknown field with such a name is taken for a constraint on the answer, so it is refused, not ignored.
_CONSTRAINT: Final = re.compile(
    r"^guided_|structur|gramma|regex|regexp|ebnf|gbnf|json_?schema|schema$|_fsm|constrain", re.I
)
_CONSTRAINT_PARTS: Final[Mapping[str, tuple[Any, ...]]] = {
    "disable_any_whitespace": (None, False),
    "disable_additional_properties": (None, False),
    "disable_fallback": (None, False, True),
    "whitespace_pattern": (None,),
    "structural_tag": (None,),
}


class Wire(BaseModel):
    """Base of every part of a request."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())


class StreamOptions(Wire):
    """What a stream carries besides its answer."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchemaFormat(Wire):
    """`response_format.json_schema`."""

    name: Name | None = None
    schema_: JsonObject | bool | None = Field(None, alias="schema")


class ResponseFormat(Wire):
    """`response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    schema_: JsonObject | None = Field(None, alias="schema")  # for `json_object`, as other servers accept it


class StructuredOutputs(Wire):
    """vLLM's `structured_outputs`."""

    json_: GrammarText | JsonObject | None = Field(None, alias="json")
    regex: GrammarText | None = None
    choice: Choices | None = None
    grammar: GrammarText | None = None
    json_object: bool | None = None


class CommonOptions(Wire):
    """Fields common to completions and chats."""

    model: Name | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = Field(None, ge=LOW_INT64, le=HIGH_INT64)
    stop: Annotated[str, Field(max_length=MAX_STOP_STRING_LEN)] | StopStrings | None = None
    stop_token_ids: StopTokenIds | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: LogitBias | None = None
    bad_words: BadWords | None = None
    allowed_token_ids: AllowedTokenIds | None = None
    prompt_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: GrammarText | JsonObject | None = None
    guided_regex: GrammarText | None = None
    guided_choice: Choices | None = None
    guided_grammar: GrammarText | None = None
    regex: GrammarText | None = None
    ebnf: GrammarText | None = None
    grammar: GrammarText | None = None
    best_of: int | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=HIGH_INT32)
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    return_timings: bool | None = None
    priority: int | None = None
    cache_salt: str | None = Field(None, max_length=MAX_TENANT_LEN)
    request_id: Name | None = None

    @property
    def num_choices(self) -> int:
        """Number of answers to each prompt."""
        return 1 if self.n is None else self.n

    @property
    def turn(self) -> int | None:
        """`GenerateRequest.priority`: low or high, or none for the usual one; higher served first.

        vLLM accepts any number and serves lower ones first; 0 is its default.
        """
        return None if not self.priority else HIGH if self.priority < 0 else LOW

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and self.stream_options.include_usage is True

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of a stream reports the usage so far."""
        return (
            self.include_usage and self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)
        )

    def refuse_unbuilt(self) -> None:
        """Refuse options that would change the answer and are not supported.

        Raises:
            InvalidRequest: names the first such field.
            ConflictingOptions: options for streams without a stream.
        """
        num_unknown = len(self.model_extra or {})
        if num_unknown > MAX_UNKNOWN:
            raise InvalidRequest(f"{num_unknown} fields that are not known; at most {MAX_UNKNOWN}", limit=MAX_UNKNOWN)
        for name, value in (self.model_extra or {}).items():
            if name in REFUSED and value not in REFUSED[name][0]:
                raise InvalidRequest(f"{name} is not supported: {REFUSED[name][1]}", field=name)
            if name not in REFUSED and name not in HARMLESS and value is not None and _CONSTRAINT.search(name):
                why = "use response_format or structured_outputs to say what the answer must be"
                raise InvalidRequest(f"{name[:64]} is not known: {why}", field=name[:64])
        for name, value in ((self.structured_outputs and self.structured_outputs.model_extra) or {}).items():
            if value not in _CONSTRAINT_PARTS.get(name, (None,)):
                raise InvalidRequest(f"structured_outputs.{name[:64]} is not supported", field="structured_outputs")
        if self.best_of not in (None, self.num_choices):
            raise InvalidRequest(
                "best_of is not supported beyond n: only the answers that are returned are made", field="best_of"
            )
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequest("truncate_prompt_tokens = 0 leaves no prompt", field="truncate_prompt_tokens")
        if self.stream_options is not None and not self.stream:
            raise ConflictingOptions("stream_options need stream = true", field="stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise ConflictingOptions("prompt_logprobs cannot be streamed", field="prompt_logprobs")

    def ignored(self) -> list[str]:
        """Return the unknown fields of the request."""
        unknown = (name for name in self.model_extra or {} if name not in REFUSED and name not in HARMLESS)
        return sorted(name for name in unknown if re.fullmatch("[A-Za-z0-9_.-]{1,64}", name))

    def sampling(self, encode: Callable[[str], list[int]]) -> inference_pb2.Sampling:
        """Return the given sampling values as gRPC clients would send them; their ranges are checked later.

        Args:
            encode: tokenizes text, for `bad_words`.

        Raises:
            InvalidSampling: a value does not fit its message field.
            InvalidText: a stop string is not valid Unicode.
        """
        message = inference_pb2.Sampling()
        for name in _SCALARS:
            _set(message, name, getattr(self, name))
        _set(message, "top_k", 0 if self.top_k == -1 else self.top_k)  # both are vLLM's spellings of "all tokens"
        _set(message, "seed", None if self.seed is None else self.seed & SEED_MASK)
        _extend(message.stop, "stop", [self.stop] if isinstance(self.stop, str) else self.stop or ())
        _extend(message.stop_token_ids, "stop_token_ids", self.stop_token_ids or ())
        _add_biases(message, self.logit_bias or {})
        for word in self.bad_words or ():
            # A word has different tokens at the start of a text and after a space (as in vLLM).
            for text in {word.lstrip(), f" {word.lstrip()}"}:
                message.bad_words.add(ids=encode(text))
        if self.allowed_token_ids is not None:
            message.allowed_token_ids.SetInParent()
            _extend(message.allowed_token_ids.ids, "allowed_token_ids", self.allowed_token_ids)
        grammar = self.constraint()
        if grammar is not None:
            message.grammar.CopyFrom(grammar)
        return message

    def constraint(self) -> inference_pb2.Grammar | None:
        """Return the constraint on the answer's form; None if there is none.

        Raises:
            ConflictingOptions: more than one option gives a constraint.
            InvalidRequest: a `response_format` lacks its schema.
        """
        given = self._given()
        if len(given) > 1:
            raise ConflictingOptions(f"{' and '.join(given)} exclude each other", field=list(given)[1])
        form = next(iter(given.values()), None)
        if form is None:
            return None
        grammar = inference_pb2.Grammar()
        try:
            setattr(grammar, form[0], True if form[0] == "json_object" else form[1])
        except UnicodeEncodeError as error:
            field = next(iter(given))
            raise InvalidText(f"{field} is not valid UTF-8 at character {error.start}", field=field) from error
        return grammar

    def constrained_by(self) -> str:
        """Name of the option that gives the constraint; empty if there is none."""
        return next(iter(self._given()), "")

    def _given(self) -> dict[str, tuple[str, str]]:
        return {name: form for name, form in self._forms().items() if form is not None}

    def _forms(self) -> dict[str, tuple[str, str] | None]:
        forms = {
            "response_format": self._response_form(),
            "guided_json": _schema(self.guided_json),
            "guided_regex": _pair("regex", self.guided_regex),
            "guided_choice": _choice(self.guided_choice, "guided_choice"),
            "guided_grammar": _pair("grammar", self.guided_grammar),
            "regex": _pair("regex", self.regex),
            "ebnf": _pair("grammar", self.ebnf),
            "grammar": _pair("grammar", self.grammar),
        }
        outputs = self.structured_outputs
        if outputs is not None:
            forms |= {
                "structured_outputs.json": _schema(outputs.json_),
                "structured_outputs.regex": _pair("regex", outputs.regex),
                "structured_outputs.choice": _choice(outputs.choice, "structured_outputs.choice"),
                "structured_outputs.grammar": _pair("grammar", outputs.grammar),
                "structured_outputs.json_object": ("json_object", "") if outputs.json_object else None,
            }
        return forms

    def _response_form(self) -> tuple[str, str] | None:
        asked = self.response_format
        if asked is None or asked.type == "text":
            return None
        if asked.type == "json_object":
            return ("json_object", "") if asked.schema_ is None else _schema(asked.schema_)
        if asked.json_schema is None or asked.json_schema.schema_ is None:
            raise InvalidRequest("response_format: json_schema.schema is missing", field="response_format")
        return ("json_schema", json.dumps(asked.json_schema.schema_, ensure_ascii=False))


_SPECIAL: Final = re.compile(r"([\\.+*?()|\[\]{}^$#&~-])")
# Fields copied to the message field of the same name.
_SCALARS: Final = [
    name for name in SCALAR_FIELDS if name in CommonOptions.model_fields and name not in ("top_k", "seed")
]


def _add_biases(message: inference_pb2.Sampling, biases: Mapping[str, float]) -> None:
    wrong = [token for token in biases if not re.fullmatch("[0-9]{1,9}", token)]
    if wrong:
        named = ", ".join(repr(token[:20]) for token in wrong[:MAX_NAMED])
        rest = f" and {len(wrong) - MAX_NAMED} more" if len(wrong) > MAX_NAMED else ""
        raise InvalidSampling(f"logit_bias: no token id: {named}{rest}", field="logit_bias")
    for token, bias in biases.items():
        message.logit_bias.add(token_id=int(token), bias=bias)


def _set(message: inference_pb2.Sampling, name: str, value: Any) -> None:
    if value is None:
        return
    try:
        setattr(message, name, value)
    except ValueError as error:
        raise InvalidSampling(f"{name} = {value!r:.40}: out of range", field=name) from error


def _extend(values: Any, name: str, given: Any) -> None:
    try:
        values.extend(given)
    except UnicodeEncodeError as error:
        raise InvalidText(f"{name} is not valid UTF-8 at character {error.start}", field=name) from error
    except ValueError as error:
        raise InvalidSampling(f"{name}: out of range", field=name) from error


def _pair(kind: str, text: str | None) -> tuple[str, str] | None:
    return None if text is None else (kind, text)


def _schema(given: str | dict[str, Any] | None) -> tuple[str, str] | None:
    if given is None:
        return None
    return ("json_schema", given if isinstance(given, str) else json.dumps(given, ensure_ascii=False))


def _choice(given: list[str] | None, field: str) -> tuple[str, str] | None:
    if given is None:
        return None
    if not given:
        raise InvalidRequest(f"{field} is empty", field=field)
    if sum(map(len, given)) > MAX_GRAMMAR_BYTES:
        message = f"{field}: {sum(map(len, given))} characters; at most {MAX_GRAMMAR_BYTES}"
        raise InvalidGrammar(message, kind="regex", field=field)
    return ("regex", "|".join(_SPECIAL.sub(r"\\\1", text) for text in given))
