"""One answer of a chat: chunks in, OpenAI's JSON of it out, piece by piece or whole."""

import secrets
from collections.abc import Callable
from typing import Any, Final

from baton.proto import inference_pb2
from baton.router.openai.chat_request import ChatRequest
from baton.router.openai.completion_choice import stop_reason_of
from baton.router.openai.reasoning import ReasoningCount, ReasoningSplitter
from baton.router.openai.token_names import TokenNames
from baton.router.openai.tool_calls import Parts, Splitter

Delta = dict[str, Any]
THOUGHTS: Final = ("reasoning", "reasoning_content")  # vLLM's name, and the older one
_NOTHING_ELSE: Final[Delta] = dict.fromkeys(("refusal", "annotations", "audio", "function_call"))


class ChatChoice:
    """One of `choices`.

    Args:
        index: its number in the reply.
        asked: the call.
        names: of tokens.
        reasoning: splits off thinking; None leaves it in the text.
        tools: splits off calls; None leaves them in the text.
        calls_finish: whether a call that ends the answer is its reason (`tool_calls`).
        make_id: of a call.
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
        make_id: Callable[[], str] = lambda: f"call_{secrets.token_hex(12)}",
    ) -> None:
        self._index = index
        self._asked = asked
        self._names = names
        self._reasoning = reasoning
        self._count = None if reasoning is None else ReasoningCount(names.stream(), is_open=reasoning.is_open)
        self._tools = tools
        self._calls_finish = calls_finish
        self._make_id = make_id
        self._has_calls = False
        self._content = ""
        self._thoughts = ""
        self._calls: list[dict[str, Any]] = []
        self._logprobs: list[dict[str, Any]] = []
        self._token_ids: list[int] = []
        self._finish_reason: str | None = None
        self._stop_reason: int | str | None = None

    @property
    def reasoning_tokens(self) -> int | None:
        """Tokens of the thoughts so far; None where none are split off."""
        return None if self._count is None else self._count.num_tokens

    def first(self) -> dict[str, Any]:
        """The choice of the first event of a stream."""
        return self._piece({"role": "assistant", "content": ""}, None, None)

    def push(self, chunk: inference_pb2.GenerateChunk) -> dict[str, Any] | None:
        """What a chunk adds; None where there is nothing to say of it."""
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
        return piece

    def add(self, chunk: inference_pb2.GenerateChunk) -> None:
        """Take a chunk for `whole`."""
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

    def whole(self) -> dict[str, Any]:
        """All that was added, as one choice."""
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

    def _merge(self, parts: Parts, delta: Delta) -> None:
        if parts.content:
            delta["content"] = delta.get("content", "") + parts.content
        only_first = self._asked.parallel_tool_calls is False
        calls: dict[int, dict[str, Any]] = {call["index"]: call for call in delta.get("tool_calls", ())}
        for at, name in parts.begun:
            if at == 0 or not only_first:
                function = {"name": name, "arguments": ""}
                calls[at] = {"index": at, "id": self._make_id(), "type": "function", "function": function}
        for at, arguments in parts.arguments:
            if at == 0 or not only_first:
                call = calls.setdefault(at, {"index": at, "function": {"arguments": ""}})
                call["function"]["arguments"] += arguments
        if calls:
            self._has_calls = True
            delta["tool_calls"] = list(calls.values())

    def _reason(self, reason: str) -> str:
        return "tool_calls" if reason == "stop" and self._has_calls and self._calls_finish else reason

    def _piece(self, delta: Delta, logprobs: dict[str, Any] | None, finish_reason: str | None) -> dict[str, Any]:
        return {"index": self._index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
