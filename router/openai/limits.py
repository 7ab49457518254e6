"""Limits of every field of a request's body: the types that its models are built from, and limits of its shape.

Each field uses one of these types, never a bare `str`, `list` or `dict`: tests/router/openai/test_limits.py walks all
models and fails on a field without a limit. Values beyond a limit are refused before they are copied, tokenized or
rendered.
"""

import re
from typing import Annotated, Any, Final

from pydantic import Field

from baton.core.errors import InvalidRequest
from baton.core.requests.answer_structure import MAX_GRAMMAR_BYTES
from baton.core.requests.sampling import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIASES,
    MAX_STOP_STRING_LEN,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)

MAX_BYTES: Final = 1 << 30  # for a text bounded only by the body's own limit
MAX_NAME_LEN: Final = 256
MAX_BAD_WORD_CHARS: Final = 256
MAX_BAD_TEXTS: Final = MAX_BAD_WORDS // 2  # each is two token sequences: at the start of a text, and after a space
MAX_MESSAGES: Final = 1 << 14
MAX_PARTS: Final = 1 << 12  # in a message's content
MAX_TOOLS: Final = 1024
MAX_CALLS: Final = 1024  # tool calls in one earlier message
MAX_PROMPTS: Final = 1 << 12
MAX_KEYS: Final = 512  # at the top level of a client's own JSON object
MAX_CHOICE_FORMS: Final = 1 << 12
MAX_UNKNOWN: Final = 64  # unknown fields
# In the whole body: building one object or array costs a hundred times its two bytes.
MAX_CONTAINERS: Final = 1 << 17
# A body within these limits is read on the event loop, others by another process.
LIGHT_BYTES: Final = 32 << 10
LIGHT_CONTAINERS: Final = 48
LIGHT_ITEMS: Final = 256
LIGHT_NUMBERS: Final = 1200  # items other than strings: a microsecond each, while names and words take many

Name = Annotated[str, Field(max_length=MAX_NAME_LEN)]
Text = Annotated[str, Field(max_length=MAX_BYTES)]  # bounded by the body's limit
GrammarText = Annotated[str, Field(max_length=MAX_GRAMMAR_BYTES)]
StopStrings = Annotated[
    list[Annotated[str, Field(max_length=MAX_STOP_STRING_LEN)]], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)
]
StopTokenIds = Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)]
AllowedTokenIds = Annotated[list[int], Field(max_length=MAX_ALLOWED_TOKEN_IDS, fail_fast=True)]
BadWords = Annotated[
    list[Annotated[str, Field(max_length=MAX_BAD_WORD_CHARS)]], Field(max_length=MAX_BAD_TEXTS, fail_fast=True)
]
TokenKey = Annotated[str, Field(max_length=32)]
LogitBias = Annotated[dict[TokenKey, float], Field(max_length=MAX_LOGIT_BIASES, fail_fast=True)]
Choices = Annotated[list[GrammarText], Field(max_length=MAX_CHOICE_FORMS, fail_fast=True)]
JsonObject = Annotated[dict[Name, Any], Field(max_length=MAX_KEYS)]  # nested values are bounded by `check_shape`
TokenIds = Annotated[list[int], Field(max_length=MAX_BYTES, fail_fast=True)]  # as `Text`
Texts = Annotated[list[Text], Field(max_length=MAX_PROMPTS, fail_fast=True)]
ManyTokenIds = Annotated[list[TokenIds], Field(max_length=MAX_PROMPTS, fail_fast=True)]

_STRING: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)


def is_light(body: bytes) -> bool:
    """Whether a body can be read on the event loop without delaying it; counts bytes, parses nothing."""
    return (
        len(body) <= LIGHT_BYTES
        and body.count(b"{") + body.count(b"[") <= LIGHT_CONTAINERS
        and (num_items := body.count(b",")) <= LIGHT_NUMBERS
        and min(num_items, body.count(b'"') // 2) <= LIGHT_ITEMS
    )


def check_shape(body: bytes) -> None:
    """Refuse a body with too many objects and arrays, before any are built.

    Raises:
        InvalidRequest: there are more than `MAX_CONTAINERS`.
    """
    if body.count(b"{") + body.count(b"[") <= MAX_CONTAINERS:
        return
    outside = _STRING.sub(b"", body)
    num = outside.count(b"{") + outside.count(b"[")
    if num > MAX_CONTAINERS:
        raise InvalidRequest(f"the body holds {num} objects and arrays; at most {MAX_CONTAINERS}", limit=MAX_CONTAINERS)
