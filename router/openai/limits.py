"""How much of everything a request's body may hold: the types of which its models are built, and what its shape may be.

A field takes one of these types, never a bare `str`, `list` or `dict`: tests/router/openai/test_limits.py walks all
models and fails on a field without a limit. What a limit forbids is refused before it is copied, tokenized or rendered.
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

MAX_BYTES: Final = 1 << 30  # of a text that only the body's own limit bounds
MAX_NAME_LEN: Final = 256
MAX_BAD_WORD_CHARS: Final = 256
MAX_MESSAGES: Final = 1 << 14
MAX_PARTS: Final = 1 << 12  # of a message's content
MAX_TOOLS: Final = 1024
MAX_CALLS: Final = 1024  # of tools, in one earlier message
MAX_PROMPTS: Final = 1 << 12
MAX_KEYS: Final = 512  # of a JSON object of the client's own, at its top
MAX_CHOICE_FORMS: Final = 1 << 12
MAX_UNKNOWN: Final = 64  # fields that are not known here
# Of the whole body: what one object or array costs to build is a hundred times its two bytes.
MAX_CONTAINERS: Final = 1 << 17
# A body is read on the event loop if it has no more than this, and by another process else.
LIGHT_BYTES: Final = 32 << 10
LIGHT_CONTAINERS: Final = 48
LIGHT_ITEMS: Final = 256
LIGHT_NUMBERS: Final = 1200  # items that are no strings: a microsecond each, where names and words cost many

Name = Annotated[str, Field(max_length=MAX_NAME_LEN)]
Text = Annotated[str, Field(max_length=MAX_BYTES)]  # the body's limit is what bounds it
GrammarText = Annotated[str, Field(max_length=MAX_GRAMMAR_BYTES)]
StopStrings = Annotated[
    list[Annotated[str, Field(max_length=MAX_STOP_STRING_LEN)]], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)
]
StopTokenIds = Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)]
AllowedTokenIds = Annotated[list[int], Field(max_length=MAX_ALLOWED_TOKEN_IDS, fail_fast=True)]
BadWords = Annotated[
    list[Annotated[str, Field(max_length=MAX_BAD_WORD_CHARS)]], Field(max_length=MAX_BAD_WORDS, fail_fast=True)
]
TokenKey = Annotated[str, Field(max_length=32)]
LogitBias = Annotated[dict[TokenKey, float], Field(max_length=MAX_LOGIT_BIASES, fail_fast=True)]
Choices = Annotated[list[GrammarText], Field(max_length=MAX_CHOICE_FORMS, fail_fast=True)]
JsonObject = Annotated[dict[Name, Any], Field(max_length=MAX_KEYS)]  # what is inside counts by `check_shape`
TokenIds = Annotated[list[int], Field(max_length=MAX_BYTES, fail_fast=True)]  # as `Text`
Texts = Annotated[list[Text], Field(max_length=MAX_PROMPTS, fail_fast=True)]
ManyTokenIds = Annotated[list[TokenIds], Field(max_length=MAX_PROMPTS, fail_fast=True)]

_STRING: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)


def is_light(body: bytes) -> bool:
    """Whether reading a body takes no longer than the event loop may: bytes are counted, nothing is parsed."""
    return (
        len(body) <= LIGHT_BYTES
        and body.count(b"{") + body.count(b"[") <= LIGHT_CONTAINERS
        and (num_items := body.count(b",")) <= LIGHT_NUMBERS
        and min(num_items, body.count(b'"') // 2) <= LIGHT_ITEMS
    )


def check_shape(body: bytes) -> None:
    """Refuse a body of too many objects and arrays, whatever they are, before they are built.

    Raises:
        InvalidRequest: there are more than `MAX_CONTAINERS`.
    """
    if body.count(b"{") + body.count(b"[") <= MAX_CONTAINERS:
        return
    outside = _STRING.sub(b"", body)
    num = outside.count(b"{") + outside.count(b"[")
    if num > MAX_CONTAINERS:
        raise InvalidRequest(f"the body holds {num} objects and arrays; at most {MAX_CONTAINERS}", limit=MAX_CONTAINERS)
