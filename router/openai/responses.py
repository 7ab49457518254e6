"""`/v1/responses`: chats in the words of OpenAI's newer API. Nothing is stored."""

from typing import Any, Final

from baton.core.errors import BatonError
from baton.proto import inference_pb2
from baton.router.openai.chat_request import ChatRequest
from baton.router.openai.chat_steps import Step, steps
from baton.router.openai.chats import ChatCall, Chats
from baton.router.openai.errors import HttpRefusal
from baton.router.openai.front import Front
from baton.router.openai.reply import Manner
from baton.router.openai.responses_request import ResponsesRequest
from baton.router.openai.understood import Understood
from baton.router.openai.usage import Usage

Data = dict[str, Any]
# Of ids, for each kind of item.
_PREFIXES: Final = {"thought": "rs", "text": "msg", "call": "fc"}


class ResponsesManner(Manner):
    """Events have names and numbers, and no other one ends a stream."""

    def error_event(self, error: BatonError | HttpRefusal, num_events: int) -> Data:
        """The event `error`."""
        return {"type": "error", "sequence_number": num_events} | self.error(error)


class ResponsesCall(ChatCall):
    """A chat whose answer is a list of items."""

    def __init__(self, asked: ChatRequest, front: Front, understood: Understood) -> None:
        super().__init__(asked, front, understood)
        self.id = f"resp_{understood.request_id}"
        self._echoed = understood.echoed
        self.items = Items(understood.request_id)

    def add(self, at: int, chunk: inference_pb2.GenerateChunk) -> None:
        """Take a chunk for `document`."""
        self.feed(at, chunk)

    def feed(self, at: int, chunk: inference_pb2.GenerateChunk) -> list[Data]:
        """Events of what a chunk adds to the items."""
        return [event for choice in self.push(at, chunk) for event in self.items.add(choice)]

    def document(self, envelope: Data, usage: Usage) -> Data:
        """The response as it ended."""
        self.items.end()
        is_cut = self.items.is_cut
        details = {"reason": "max_output_tokens"} if is_cut else None
        end = {"status": "incomplete" if is_cut else "completed", "incomplete_details": details}
        return self.response(envelope) | end | {"output": self.items.output, "usage": _usage_data(usage)}

    def response(self, envelope: Data) -> Data:
        """The response before it has any output."""
        about = {"id": self.id, "object": "response", "created_at": envelope["created"], "model": envelope["model"]}
        state: Data = {"status": "in_progress", "error": None, "incomplete_details": None, "output": [], "usage": None}
        return about | state | dict(self._echoed)

    def events(self, asked: ChatRequest, envelope: Data, usage: Usage) -> "ResponseEvents":
        """The response, item by item."""
        return ResponseEvents(self, envelope, usage)


class ResponseEvents:
    """A stream of a response's items, in numbered events.

    Args:
        call: makes them.
        envelope: the response's id, model and time.
        usage: of the call.
    """

    def __init__(self, call: ResponsesCall, envelope: Data, usage: Usage) -> None:
        self._call = call
        self._envelope = envelope
        self._usage = usage
        self._num = 0

    def first(self) -> list[Data]:
        """The response without its output."""
        self._call.first()
        begun = self._call.response(self._envelope)
        return self._numbered(
            [{"type": f"response.{state}", "response": begun} for state in ("created", "in_progress")]
        )

    def push(self, at: int, chunk: inference_pb2.GenerateChunk) -> list[Data]:
        """More of its items."""
        return self._numbered(self._call.feed(at, chunk))

    def last(self) -> list[Data]:
        """The whole of it."""
        ended = self._call.items.end()
        whole = self._call.document(self._envelope, self._usage)
        return self._numbered([*ended, {"type": f"response.{whole['status']}", "response": whole}])

    def _numbered(self, events: list[Data]) -> list[Data]:
        first, self._num = self._num, self._num + len(events)
        return [event | {"sequence_number": first + at} for at, event in enumerate(events)]


class Items:
    """A response's output as it grows: of all items only the last one does.

    Args:
        request_id: that the items' ids are made of.
    """

    def __init__(self, request_id: str) -> None:
        self.output: list[Data] = []
        self.is_cut = False
        self._request_id = request_id
        self._kind = ""  # of the item that grows
        self._call = ("", "")
        self._texts: list[str] = []
        self._logprobs: list[Data] = []
        self._unshown: list[Data] = []  # log-probabilities of tokens whose text has not come yet

    def add(self, choice: Data) -> list[Data]:
        """Events of a choice's piece."""
        if self._kind == "thought":
            self._unshown = []  # thoughts are shown without
        self._unshown += (choice["logprobs"] or {}).get("content", ())
        made = [event for step in steps(choice["delta"]) for event in self._step(step)]
        if choice["finish_reason"] is not None:
            self.is_cut = choice["finish_reason"] == "length"
        return made

    def end(self) -> list[Data]:
        """Events of the end; none the second time."""
        return self._close("incomplete" if self.is_cut else "completed")

    def _step(self, step: Step) -> list[Data]:
        if step.kind == "call":
            return self._open("call", step.call)
        if step.kind == "arguments":
            self._texts.append(step.text)
            return [self._event("response.function_call_arguments.delta", {"delta": step.text})]
        opened = [] if self._kind == step.kind else self._open(step.kind)
        self._texts.append(step.text)
        if step.kind == "thought":
            return [*opened, self._event("response.reasoning_text.delta", {"content_index": 0, "delta": step.text})]
        logprobs, self._unshown = self._unshown, []
        self._logprobs += logprobs
        more = {"content_index": 0, "delta": step.text, "logprobs": logprobs}
        return [*opened, self._event("response.output_text.delta", more)]

    def _open(self, kind: str, call: tuple[str, str] = ("", "")) -> list[Data]:
        closed = self._close("completed")
        self._kind, self._call = kind, call
        made = [*closed, self._whole("response.output_item.added", self._item("in_progress"))]
        if kind != "call":
            made.append(self._event("response.content_part.added", {"content_index": 0, "part": self._part()}))
        return made

    def _close(self, status: str) -> list[Data]:
        kind, text = self._kind, "".join(self._texts)
        if not kind:
            return []
        if kind == "call":
            called = {"name": self._call[1], "arguments": text}
            made = [self._event("response.function_call_arguments.done", called)]
        else:
            more = {"logprobs": self._logprobs} if kind == "text" else {}
            done = "output_text" if kind == "text" else "reasoning_text"
            made = [self._event(f"response.{done}.done", {"content_index": 0, "text": text} | more)]
            made.append(self._event("response.content_part.done", {"content_index": 0, "part": self._part()}))
        item = self._item(status)
        made.append(self._whole("response.output_item.done", item))
        self.output.append(item)
        self._kind, self._texts, self._logprobs = "", [], []
        return made

    @property
    def _id(self) -> str:
        return f"{_PREFIXES[self._kind]}_{self._request_id}_{len(self.output)}"

    def _event(self, kind: str, more: Data) -> Data:
        return {"type": kind, "output_index": len(self.output), "item_id": self._id} | more

    def _whole(self, kind: str, item: Data) -> Data:
        return {"type": kind, "output_index": len(self.output), "item": item}

    def _part(self) -> Data:
        text = "".join(self._texts)
        if self._kind == "thought":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(self._logprobs)}

    def _item(self, status: str) -> Data:
        about = {"id": self._id, "status": status}
        if self._kind == "call":
            id_, name = self._call
            called = {"call_id": id_, "name": name, "arguments": "".join(self._texts)}
            return about | {"type": "function_call"} | called
        content = [self._part()] if self._texts else []
        if self._kind == "thought":
            return about | {"type": "reasoning", "summary": [], "content": content, "encrypted_content": None}
        return about | {"type": "message", "role": "assistant", "content": content}


class Responses(Chats):
    """The endpoint."""

    kind = ResponsesRequest
    manner = ResponsesManner(
        names_events=True,
        done=b"",
        renamed={
            "messages": "input",
            "max_completion_tokens": "max_output_tokens",
            "max_tokens": "max_output_tokens",
            "response_format": "text",
            "reasoning_effort": "reasoning",
            "truncate_prompt_tokens": "truncation",
        },
    )

    def call(self, asked: ChatRequest, understood: Understood) -> ResponsesCall:
        """The call that a body is."""
        return ResponsesCall(asked, self.front, understood)


def _usage_data(usage: Usage) -> Data:
    used = usage.as_data()
    thought = used.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
    return {
        "input_tokens": used["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": used["prompt_tokens_details"]["cached_tokens"]},
        "output_tokens": used["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": thought},
        "total_tokens": used["total_tokens"],
    }
