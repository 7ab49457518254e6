"""A parsed body: messages for the workers, and what the reply needs to know."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pydantic import BaseModel

from baton.proto import inference_pb2

REQUEST_ID: Final = re.compile("[!-~]{1,128}")  # of a client's request id
# Fields that are already in the messages, the prompt or `Understood`: no reply needs them.
SPENT: Final = frozenset(
    "messages prompt tokens tools stop stop_token_ids logit_bias bad_words allowed_token_ids response_format "
    "structured_outputs guided_json guided_regex guided_choice guided_grammar regex ebnf grammar chat_template_kwargs "
    "request_id".split()
)
_LENGTH_BYTES: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingJob:
    """What is known about a request before its body is read.

    Attributes:
        kind: name of the request model for the body.
        request_id: from the header, or generated; the body may give another.
        max_answers: maximum number of answers per call.
        max_model_len: maximum number of tokens in a prompt.
        keeps_schemas: whether replies need the tools' schemas.
    """

    kind: str
    request_id: str
    max_answers: int
    max_model_len: int
    keeps_schemas: bool = False


@dataclass(slots=True, kw_only=True)
class Understood:
    """A parsed body.

    Attributes:
        asked: the body; if another process read it, without the fields in `SPENT`.
        request_id: the client's name for the request.
        requests: one for each prompt, without sampling.
        sampling: shared by all requests.
        ignored: unknown fields.
        constrained_by: the option that gives the answer's form; empty if at most tools do.
        is_open: whether the prompt ends inside a thought.
        splits_thought: whether thoughts are split off the answer's content.
        splits_calls: whether tool calls are split off the answer's content.
        schemas: schemas of the tools' parameters, by name, if replies need them.
        echoed: options that the reply repeats, for bodies in another format than a chat's.
    """

    asked: BaseModel
    request_id: str
    requests: list[inference_pb2.GenerateRequest]
    sampling: inference_pb2.Sampling = field(default_factory=inference_pb2.Sampling)
    ignored: list[str] = field(default_factory=list)
    constrained_by: str = ""
    is_open: bool = False
    splits_thought: bool = False
    splits_calls: bool = False
    schemas: Mapping[str, Any] = field(default_factory=dict)
    echoed: Mapping[str, Any] = field(default_factory=dict)

    def to_parts(self) -> list[bytes]:
        """Serialize for another process: a head, the rest of the body, the sampling, and each request."""
        names = (
            "request_id", "ignored", "constrained_by", "is_open", "splits_thought", "splits_calls", "schemas", "echoed",
        )  # fmt: skip
        head = json.dumps({name: getattr(self, name) for name in names}).encode("ascii")
        spent = {*SPENT, *(self.asked.model_extra or {})}
        body = self.asked.model_dump_json(by_alias=True, exclude_none=True, exclude=spent).encode("utf-8")
        requests = [one.SerializeToString() for one in self.requests]
        return [head, body, self.sampling.SerializeToString(), *requests]

    @classmethod
    def from_parts(cls, parts: Sequence[bytes], kind: type[BaseModel]) -> "Understood":
        """Parse what `to_parts` wrote."""
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
    """Join parts into one frame with its length in front."""
    body = b"".join(len(part).to_bytes(_LENGTH_BYTES, "little") + part for part in parts)
    return len(body).to_bytes(_LENGTH_BYTES, "little") + body


def parted(body: bytes) -> list[bytes]:
    """Split a frame, without its length, into parts."""
    parts, at = [], 0
    while at < len(body):
        size = int.from_bytes(body[at : at + _LENGTH_BYTES], "little")
        parts.append(body[at + _LENGTH_BYTES : at + _LENGTH_BYTES + size])
        at += _LENGTH_BYTES + size
    return parts


LENGTH_BYTES: Final = _LENGTH_BYTES
