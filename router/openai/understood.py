"""A body as it was understood: messages for the workers, and what the reply must know of it."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pydantic import BaseModel

from baton.proto import inference_pb2

REQUEST_ID: Final = re.compile("[!-~]{1,128}")  # of a client
# What is in the messages already, or in the prompt, or in `Understood`: no reply is made from these fields.
SPENT: Final = frozenset(
    "messages prompt tokens tools stop stop_token_ids logit_bias bad_words allowed_token_ids response_format "
    "structured_outputs guided_json guided_regex guided_choice guided_grammar regex ebnf grammar chat_template_kwargs "
    "request_id".split()
)
_LENGTH_BYTES: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingJob:
    """What is known of a request before its body is read.

    Attributes:
        kind: the name of the model that its body must fit.
        request_id: as its header names it, or one that was made for it; the body may name another.
        max_answers: of one call.
        max_model_len: no prompt has more tokens.
        keeps_schemas: replies are made from the tools' schemas.
    """

    kind: str
    request_id: str
    max_answers: int
    max_model_len: int
    keeps_schemas: bool = False


@dataclass(slots=True, kw_only=True)
class Understood:
    """A body that was understood.

    Attributes:
        asked: the body; where another process read it, without what is in the messages.
        request_id: what the client calls it.
        requests: one for each prompt, without sampling.
        sampling: of all of them.
        ignored: fields that are not known here.
        is_open: the prompt ends with the beginning of a thought.
        splits_thought: a thought is no part of the answer's content.
        splits_calls: calls of tools are none.
        schemas: of the tools' parameters, by name, where replies are made from them.
        echoed: what the reply repeats of a body whose words are not a chat's.
    """

    asked: BaseModel
    request_id: str
    requests: list[inference_pb2.GenerateRequest]
    sampling: inference_pb2.Sampling = field(default_factory=inference_pb2.Sampling)
    ignored: list[str] = field(default_factory=list)
    is_open: bool = False
    splits_thought: bool = False
    splits_calls: bool = False
    schemas: Mapping[str, Any] = field(default_factory=dict)
    echoed: Mapping[str, Any] = field(default_factory=dict)

    def to_parts(self) -> list[bytes]:
        """For another process: a head, what is left of the body, the sampling, and each request."""
        names = ("request_id", "ignored", "is_open", "splits_thought", "splits_calls", "schemas", "echoed")
        head = json.dumps({name: getattr(self, name) for name in names}).encode("ascii")
        spent = {*SPENT, *(self.asked.model_extra or {})}
        body = self.asked.model_dump_json(by_alias=True, exclude_none=True, exclude=spent).encode("utf-8")
        requests = [one.SerializeToString() for one in self.requests]
        return [head, body, self.sampling.SerializeToString(), *requests]

    @classmethod
    def from_parts(cls, parts: Sequence[bytes], kind: type[BaseModel]) -> "Understood":
        """What `to_parts` wrote."""
        head, body, sampling, *requests = parts
        data = json.loads(body)
        if kind.model_fields.get("messages") is not None:
            data["messages"] = getattr(kind, "nothing_said", [])
        if "tokens" in kind.model_fields:
            data["tokens"] = []
        asked: Any = kind.model_validate(data, strict=False)
        return cls(
            asked=asked,
            requests=[inference_pb2.GenerateRequest.FromString(one) for one in requests],
            sampling=inference_pb2.Sampling.FromString(sampling),
            **json.loads(head),
        )


def joined(parts: Sequence[bytes]) -> bytes:
    """Parts as one frame, behind its length."""
    body = b"".join(len(part).to_bytes(_LENGTH_BYTES, "little") + part for part in parts)
    return len(body).to_bytes(_LENGTH_BYTES, "little") + body


def parted(body: bytes) -> list[bytes]:
    """The parts of a frame, without its length."""
    parts, at = [], 0
    while at < len(body):
        size = int.from_bytes(body[at : at + _LENGTH_BYTES], "little")
        parts.append(body[at + _LENGTH_BYTES : at + _LENGTH_BYTES + size])
        at += _LENGTH_BYTES + size
    return parts


LENGTH_BYTES: Final = _LENGTH_BYTES
