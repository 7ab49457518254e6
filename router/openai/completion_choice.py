"""One answer of a completion: chunks in, OpenAI's JSON of it out, piece by piece or whole."""

from collections.abc import Sequence
from typing import Any

from baton.core.requests.request import GenerationRequest
from baton.proto import inference_pb2
from baton.router.openai.completion_request import CompletionRequest
from baton.router.openai.token_names import TokenNames, finite


class PromptReport:
    """What is said of a prompt: its text, and its log-probabilities as they come."""

    def __init__(self, request: GenerationRequest, text: str) -> None:
        self.token_ids = request.prompt_token_ids
        self.text = text
        self.reports: list[inference_pb2.TokenLogprobs] = []

    def logprobs(self, names: TokenNames) -> list[dict[str, Any] | None]:
        """As vLLM's `prompt_logprobs`; nothing precedes the first token."""
        return [None, *map(names.by_id, self.reports)]


class CompletionChoice:
    """One of `choices`.

    Args:
        index: its number in the reply.
        asked: the call.
        prompt: what it continues.
        names: of tokens.
    """

    def __init__(self, index: int, asked: CompletionRequest, prompt: PromptReport, names: TokenNames) -> None:
        self._index = index
        self._asked = asked
        self._prompt = prompt
        self._names = names
        self._has_begun = False
        self._offset = 0
        self._chunks: list[inference_pb2.GenerateChunk] = []

    def push(self, chunk: inference_pb2.GenerateChunk) -> dict[str, Any] | None:
        """What a chunk adds; None where there is nothing to say of it."""
        asked, is_first, is_hidden = self._asked, not self._has_begun, self._asked.echoes_only
        text = "" if is_hidden else chunk.text
        token_ids = [] if is_hidden else list(chunk.token_ids)
        if is_first and asked.echo:
            text = self._prompt.text + text
        logprobs = None
        if asked.logprobs is not None:
            parts = [self._echoed()] if is_first and asked.echo else []
            logprobs = _joined([*parts, self._logprobs([] if is_hidden else chunk.logprobs)])
        finish_reason = chunk.finish.reason if chunk.HasField("finish") else None
        says_ids = asked.return_token_ids and token_ids
        if not (text or finish_reason or says_ids or (logprobs and logprobs["tokens"])):
            return None
        self._has_begun = True
        return {
            "index": self._index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason_of(chunk),
            "token_ids": token_ids if asked.return_token_ids else None,
            "prompt_token_ids": list(self._prompt.token_ids) if asked.return_token_ids and is_first else None,
        }

    def add(self, chunk: inference_pb2.GenerateChunk) -> None:
        """Take a chunk for `whole`."""
        self._chunks.append(chunk)

    def whole(self) -> dict[str, Any]:
        """All that was added, as one choice. The prompt's report must be complete."""
        pieces = [piece for piece in map(self.push, self._chunks) if piece is not None]
        logprobs = [piece["logprobs"] for piece in pieces if piece["logprobs"] is not None]
        choice = pieces[-1] | {
            "text": "".join(piece["text"] for piece in pieces),
            "logprobs": _joined(logprobs) if logprobs else None,
        }
        if self._asked.return_token_ids:
            choice["token_ids"] = [token_id for piece in pieces for token_id in piece["token_ids"]]
            choice["prompt_token_ids"] = list(self._prompt.token_ids)
        report = None if self._asked.prompt_logprobs is None else self._prompt.logprobs(self._names)
        return choice | {"prompt_logprobs": report}

    def _echoed(self) -> dict[str, list[Any]]:
        """The prompt's own tokens; nothing precedes the first."""
        first = self._logprobs_of([(self._prompt.token_ids[0], None, None)])
        return _joined([first, self._logprobs(self._prompt.reports)])

    def _logprobs(self, reports: Sequence[inference_pb2.TokenLogprobs]) -> dict[str, list[Any]]:
        return self._logprobs_of(
            [(report.token_id, finite(report.logprob), self._names.by_name(report)) for report in reports]
        )

    def _logprobs_of(self, items: list[tuple[int, float | None, dict[str, float] | None]]) -> dict[str, list[Any]]:
        tokens, offsets = [self._names.name(token_id) for token_id, _, _ in items], []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [logprob for _, logprob, _ in items],
            "top_logprobs": [top for _, _, top in items],
            "text_offset": offsets,
        }


def stop_reason_of(chunk: inference_pb2.GenerateChunk) -> int | str | None:
    """The stop token or string that an answer's last chunk names; None for EOS, and where it was none."""
    kind = chunk.finish.WhichOneof("stopped_by")
    stopped_by: int | str | None = None if kind is None else getattr(chunk.finish, kind)
    return stopped_by


def _joined(parts: Sequence[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    return {name: [item for part in parts for item in part[name]] for name in parts[0]}
