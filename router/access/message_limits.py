"""Limits of every field of a client's message, checked before any of it is copied, tokenized or kept.

Every text and every repeated field of a client's message is in the table by its path;
tests/router/test_message_limits.py walks the descriptors and fails on a field without a limit.
"""

from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from baton.core.errors import InvalidGrammar, InvalidRequest, InvalidSampling, PromptTooLong
from baton.core.requests.answer_structure import MAX_GRAMMAR_BYTES
from baton.core.requests.sampling import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_LEN,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIASES,
    MAX_STOP_STRING_LEN,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)

MAX_MODEL_NAME_LEN: Final = 4096
MAX_REQUEST_ID_LEN: Final = 128
MAX_TENANT_LEN: Final = 256
BY_SIZE: Final = -1  # limited only by the size of the whole message
Kind = type[InvalidRequest]
# path: (maximum entries of a repeated field, maximum length of a text, error); 0 where it does not apply
LIMITS: Final[dict[str, tuple[int, int, Kind]]] = {
    "model": (0, MAX_MODEL_NAME_LEN, InvalidRequest),
    "text": (0, BY_SIZE, PromptTooLong),
    "token_ids.ids": (BY_SIZE, 0, PromptTooLong),
    "request_id": (0, MAX_REQUEST_ID_LEN, InvalidRequest),
    "tenant": (0, MAX_TENANT_LEN, InvalidRequest),
    "sampling.stop": (MAX_STOP_STRINGS, MAX_STOP_STRING_LEN, InvalidSampling),
    "sampling.stop_token_ids": (MAX_STOP_TOKEN_IDS, 0, InvalidSampling),
    "sampling.logit_bias": (MAX_LOGIT_BIASES, 0, InvalidSampling),
    "sampling.bad_words": (MAX_BAD_WORDS, 0, InvalidSampling),
    "sampling.bad_words.ids": (MAX_BAD_WORD_LEN, 0, InvalidSampling),
    "sampling.allowed_token_ids.ids": (MAX_ALLOWED_TOKEN_IDS, 0, InvalidSampling),
    "sampling.grammar.json_schema": (0, MAX_GRAMMAR_BYTES, InvalidGrammar),
    "sampling.grammar.regex": (0, MAX_GRAMMAR_BYTES, InvalidGrammar),
    "sampling.grammar.grammar": (0, MAX_GRAMMAR_BYTES, InvalidGrammar),
    "sampling.grammar.structure": (0, MAX_GRAMMAR_BYTES, InvalidGrammar),
}


def check_num_answers(num: int, limit: int) -> None:
    """Refuse a call with more answers than an idle router could hold, before any work is done for it.

    Raises:
        InvalidRequest: the call asks for more answers than `limit`.
    """
    if num > limit:
        raise InvalidRequest(f"{num} answers in one call; at most {limit}", field="n", limit=limit)


def check_message(message: Message, prefix: str = "") -> None:
    """Refuse a message that exceeds `LIMITS`. The cost of the check does not grow with the excess.

    Raises:
        InvalidRequest: a field exceeds its limit; the error names it.
    """
    for field, value in message.ListFields():
        path = prefix + field.name
        items: Any = (value,)
        if is_repeated(field):
            limit = LIMITS[path][0]
            if limit != BY_SIZE and len(value) > limit:
                raise _refusal(path, len(value), limit, "entries")
            items = value
        if field.type == FieldDescriptor.TYPE_MESSAGE and _holds_more(field):
            for item in items:
                check_message(item, f"{path}.")
        elif field.type == FieldDescriptor.TYPE_STRING:
            limit = LIMITS[path][1]
            for item in items:
                if limit != BY_SIZE and len(item) > limit:
                    raise _refusal(path, len(item), limit, "characters")


def is_repeated(field: Any) -> bool:
    """Whether a field is repeated."""
    if hasattr(field, "is_repeated"):  # protobuf 6 and newer; 7 no longer has `label`
        return bool(field.is_repeated)
    return bool(field.label == FieldDescriptor.LABEL_REPEATED)


def _refusal(path: str, num: int, limit: int, what: str) -> InvalidRequest:
    name = path.removeprefix("sampling.").partition(".")[0]
    message = f"{name} has {num} {what}; at most {limit}"
    return LIMITS[path][2](message, field=name, limit=limit)


def _holds_more(field: FieldDescriptor) -> bool:
    """Whether a submessage has a field that can grow."""
    kinds = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_MESSAGE)
    message = field.message_type
    return message is not None and any(is_repeated(inner) or inner.type in kinds for inner in message.fields)
