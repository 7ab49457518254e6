"""`/v1/completions`: request model, choices and replies."""

from collections.abc import Sequence
from typing import Any, ClassVar, Final

from pydantic import Field

from baton.core.errors import ConflictingOptions, EmptyPrompt, InvalidRequest, InvalidSampling
from baton.core.requests.request import GenerationRequest
from baton.core.requests.sampling import MAX_CHOICES
from baton.core.requests.tokenizer import TokenStream
from baton.core.requests.validate import readable_end
from baton.proto import inference_pb2, wire
from baton.router.access.message_limits import check_num_answers
from baton.router.openai.front import Forms, Front
from baton.router.openai.generation import Call, GenerationEndpoint
from baton.router.openai.limits import ManyTokenIds, Text, Texts, TokenIds
from baton.router.openai.options import CommonOptions
from baton.router.openai.token_names import TokenNames, finite
from baton.router.openai.understood import ReadingJob, Understood

DEFAULT_MAX_TOKENS: Final = 16  # OpenAI's default
Prompt = str | list[int]


class CompletionRequest(CommonOptions):
    """What it asks."""

    prompt: Text | TokenIds | Texts | ManyTokenIds | None = Field(None, union_mode="left_to_right")
    echo: bool | None = None
    logprobs: int | None = None

    def prompts(self) -> list[Prompt]:
        """Return the prompts as a list.

        Raises:
            EmptyPrompt: there is none.
        """
        asked = self.prompt
        if not asked:
            raise EmptyPrompt("prompt is missing or empty", field="prompt")
        if isinstance(asked, str):
            return [asked]
        ids = [item for item in asked if isinstance(item, int)]
        return [ids] if ids else [item for item in asked if not isinstance(item, int)]

    @property
    def echoes_only(self) -> bool:
        """Whether the client wants only the prompt back."""
        return bool(self.echo) and self.max_tokens == 0

    def complete(self, sampling: inference_pb2.Sampling) -> inference_pb2.Sampling:
        """Add the options that only completion requests have.

        Raises:
            InvalidSampling: the number of log-probabilities is out of range.
        """
        if self.echoes_only:
            sampling.max_tokens = 1  # one token is generated, but not shown
        if self.logprobs is not None:
            if not 0 <= self.logprobs < 1 << 31:
                raise InvalidSampling(f"logprobs = {self.logprobs}: out of range", field="logprobs")
            sampling.logprobs = self.logprobs
            if self.echo and self.prompt_logprobs is None:
                sampling.prompt_logprobs = self.logprobs
        return sampling


class PromptReport:
    """A prompt's text and tokens, and its log-probabilities as they arrive."""

    def __init__(self, request: GenerationRequest, text: str) -> None:
        self.token_ids = request.prompt_token_ids
        self.text = text
        self.reports: list[inference_pb2.TokenLogprobs] = []

    def logprobs(self, names: TokenNames) -> list[dict[str, Any] | None]:
        """The log-probabilities in the form of vLLM's `prompt_logprobs`; the first token has none."""
        return [None, *map(names.by_id, self.reports)]


class CompletionChoice:
    """One of `choices`.

    Args:
        index: its index in the reply.
        asked: the request.
        prompt: the prompt that it continues.
        names: names of tokens.
        stream: detokenizes the answer.
    """

    def __init__(
        self, index: int, asked: CompletionRequest, prompt: PromptReport, names: TokenNames, stream: TokenStream
    ) -> None:
        self._index = index
        self._asked = asked
        self._prompt = prompt
        self._names = names
        self._stream = stream
        self._has_begun = False
        self._offset = 0
        self._chunks: list[inference_pb2.GenerateChunk] = []

    def push(self, chunk: inference_pb2.GenerateChunk) -> dict[str, Any] | None:
        """Return what a chunk adds to the stream; None if it adds nothing."""
        asked, is_first, is_hidden = self._asked, not self._has_begun, self._asked.echoes_only
        text = "" if is_hidden else chunk.text
        token_ids = [] if is_hidden else list(chunk.token_ids)
        if is_first and asked.echo:
            text = self._prompt.text + text
        logprobs = None
        if asked.logprobs is not None:
            parts = [self._echoed()] if is_first and asked.echo else []
            logprobs = _joined([*parts, self._answered([] if is_hidden else chunk.logprobs)])
        finish_reason = chunk.finish.reason if chunk.HasField("finish") else None
        stop_reason = stop_reason_of(chunk)
        if is_hidden and finish_reason == "stop":  # it stopped at a token that the client did not ask for
            finish_reason, stop_reason = "length", None
        says_ids = asked.return_token_ids and token_ids
        if not (text or finish_reason or says_ids or (logprobs and logprobs["tokens"])):
            return None
        self._has_begun = True
        choice = {
            "index": self._index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
            "token_ids": token_ids if asked.return_token_ids else None,
            "prompt_token_ids": list(self._prompt.token_ids) if asked.return_token_ids and is_first else None,
        }
        return choice | timings_of(chunk) if asked.return_timings else choice

    def add(self, chunk: inference_pb2.GenerateChunk) -> None:
        """Collect a chunk for `whole`."""
        self._chunks.append(chunk)

    def whole(self) -> dict[str, Any]:
        """Everything collected, as one choice. The prompt's report must be complete."""
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
        """Log-probabilities of the prompt's own tokens; the first has none.

        A BOS added before a text is not part of the text.
        """
        stream, text_len = self._names.stream(skip_special_tokens=False), len(self._prompt.text)
        token_ids = [self._prompt.token_ids[0], *(report.token_id for report in self._prompt.reports)]
        offsets, end = _offsets(stream, token_ids, 0)
        num_before = max(0, end + len(stream.flush()) - text_len)
        self._offset = text_len
        name = self._names.name(token_ids[0])
        first: dict[str, list[Any]] = {"tokens": [name], "token_logprobs": [None], "top_logprobs": [None]}
        found = _joined([first, self._logprobs(self._prompt.reports)])
        return found | {"text_offset": [max(0, offset - num_before) for offset in offsets]}

    def _answered(self, reports: Sequence[inference_pb2.TokenLogprobs]) -> dict[str, list[Any]]:
        offsets, self._offset = _offsets(self._stream, [report.token_id for report in reports], self._offset)
        return self._logprobs(reports) | {"text_offset": offsets}

    def _logprobs(self, reports: Sequence[inference_pb2.TokenLogprobs]) -> dict[str, list[Any]]:
        return {
            "tokens": [self._names.name(report.token_id) for report in reports],
            "token_logprobs": [finite(report.logprob) for report in reports],
            "top_logprobs": [self._names.by_name(report) for report in reports],
        }


def _offsets(stream: TokenStream, token_ids: Sequence[int], begin: int) -> tuple[list[int], int]:
    """Offset of each token in the text, and of the next one. The tokens of one character share its offset."""
    offsets = [begin]
    for token_id in token_ids:
        offsets.append(offsets[-1] + len(stream.push(token_id)))
    return offsets[:-1], offsets[-1]


def timings_of(chunk: inference_pb2.GenerateChunk) -> dict[str, Any]:
    """What `return_timings` adds to an answer's last piece: where its time went, as in gRPC's waterfall."""
    if not chunk.HasField("finish"):
        return {}
    return {"timings": {"path": chunk.finish.stats.path, **wire.waterfall_data(chunk.finish.stats)}}


def stop_reason_of(chunk: inference_pb2.GenerateChunk) -> int | str | None:
    """The stop token or string in an answer's last chunk; None for EOS, if there was none, and in other chunks."""
    if not chunk.HasField("finish"):
        return None
    kind = chunk.finish.WhichOneof("stopped_by")
    stopped_by: int | str | None = None if kind is None else getattr(chunk.finish, kind)
    return stopped_by


def _joined(parts: Sequence[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    return {name: [item for part in parts for item in part[name]] for name in parts[0]}


class CompletionCall(Call[CompletionRequest]):
    """One completion call, with a choice for each answer to each prompt."""

    object: ClassVar[str] = "text_completion"
    chunk_object: ClassVar[str] = "text_completion"
    default_max_tokens = DEFAULT_MAX_TOKENS

    def __init__(self, asked: CompletionRequest, front: Front, understood: Understood) -> None:
        self._asked = asked
        self._front = front
        self._names = TokenNames(front.model.tokenizer, as_ids=bool(asked.return_tokens_as_token_ids))
        self._prompts: list[PromptReport] = []
        self._choices: list[list[CompletionChoice]] = []
        self.hides_answers = asked.echoes_only
        self.id = f"cmpl-{understood.request_id}"
        self.requests, self.sampling = understood.requests, understood.sampling

    def begin(self, requests: Sequence[GenerationRequest]) -> None:
        """Create the choices."""
        num, names = self._asked.num_choices, self._names
        skips = not self.sampling.HasField("skip_special_tokens") or self.sampling.skip_special_tokens
        is_whole = self._asked.truncate_prompt_tokens is None
        for at, (given, request) in enumerate(zip(self.requests, requests, strict=True)):
            text = given.text if is_whole and given.HasField("text") else ""
            if self._asked.echo and not text:
                text = self._front.model.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
            prompt = PromptReport(request, text)
            self._prompts.append(prompt)
            streams = [names.stream(skip_special_tokens=skips) for _ in range(num)]
            self._choices.append(
                [
                    CompletionChoice(at * num + choice, self._asked, prompt, names, stream)
                    for choice, stream in enumerate(streams)
                ]
            )

    def push(self, at: int, chunk: inference_pb2.GenerateChunk) -> list[dict[str, Any]]:
        """Return at most one choice."""
        if chunk.prompt_logprobs:
            self._prompts[at].reports.extend(chunk.prompt_logprobs)
            return []
        piece = self._choices[at][chunk.choice].push(chunk)
        return [] if piece is None else [piece]

    def add(self, at: int, chunk: inference_pb2.GenerateChunk) -> None:
        """Collect a chunk for `whole`."""
        if chunk.prompt_logprobs:
            self._prompts[at].reports.extend(chunk.prompt_logprobs)
        else:
            self._choices[at][chunk.choice].add(chunk)

    def whole(self) -> dict[str, Any]:
        """The choices in order."""
        return {"choices": [choice.whole() for choices in self._choices for choice in choices]}


class Completions(GenerationEndpoint[CompletionRequest]):
    """Serves `/v1/completions`."""

    kind = CompletionRequest

    def call(self, asked: CompletionRequest, understood: Understood) -> CompletionCall:
        """Make the call for a request."""
        return CompletionCall(asked, self.front, understood)


def understand_completion(asked: CompletionRequest, forms: Forms, job: ReadingJob) -> Understood:
    """Translate a request into messages that share the sampling; their number is checked before any is made.

    Raises:
        InvalidRequest: the request is invalid.
    """
    if asked.echo and asked.logprobs is not None and asked.stream and asked.num_choices > 1:
        raise ConflictingOptions("echo with logprobs cannot be streamed with n > 1", field="stream")
    prompts = asked.prompts()
    check_num_answers(len(prompts) * min(max(1, asked.num_choices), MAX_CHOICES), job.max_answers)
    sampling = forms.with_defaults(asked.complete(asked.sampling(forms.encode)))
    requests = [_request(prompt, asked, job) for prompt in prompts]
    return Understood(asked=asked, request_id=job.request_id, requests=requests, sampling=sampling)


def _request(prompt: Prompt, asked: CompletionRequest, job: ReadingJob) -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest(
        model=asked.model or "",
        request_id=job.request_id,
        tenant=asked.cache_salt or "",
        priority=asked.turn,
        truncate_prompt_tokens=asked.truncate_prompt_tokens,
        add_special_tokens=asked.add_special_tokens is not False,
    )
    if isinstance(prompt, str):
        request.text = prompt
        return request
    try:
        request.token_ids.ids.extend(readable_end(prompt, asked.truncate_prompt_tokens, job.max_model_len))
    except ValueError as error:
        raise InvalidRequest(f"prompt: a token id is out of range: {error}", field="prompt") from error
    request.token_ids.SetInParent()
    return request
