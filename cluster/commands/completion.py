"""One completion, from a deployment or from this process, in the same form; `baton generate` prints it."""

import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import grpc

from baton.client.messages import generate_request
from baton.cluster.admin import error_from_rpc, open_channel
from baton.core.errors import BatonError, RequestDeadlineExceeded, StartupError, TransferFailed
from baton.core.requests.request import TokenLogprobs
from baton.core.requests.sampling import MAX_CHOICES, GrammarSpec, SamplingParams
from baton.proto import inference_pb2, inference_pb2_grpc, wire

OnText = Callable[[str], None]
RANDOM_SEED_BITS = 62


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionArguments:
    """Parameters of a request, before anything is known about the model; None means the server's default."""

    prompt: str
    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    grammar: GrammarSpec | None = None
    timeout_s: float = 600.0
    more: Mapping[str, Any] = field(default_factory=dict)  # other fields of SamplingParams, by name

    def chosen_seed(self) -> int:
        """Return the given seed, else 0 for greedy requests (which never draw), else a random one."""
        if self.seed is not None:
            return self.seed
        return 0 if self.temperature == 0 else secrets.randbits(RANDOM_SEED_BITS)

    def sampling(self) -> inference_pb2.Sampling:
        """Build the message; fields that are left to the server are absent.

        Raises:
            InvalidSampling: a number does not fit the message.
            InvalidText: a stop string is not Unicode text.
            InvalidGrammar: the grammar is not Unicode text.
        """
        default = SamplingParams()
        params = SamplingParams(
            max_tokens=default.max_tokens if self.max_tokens is None else self.max_tokens,
            temperature=self.temperature,
            top_k=default.top_k if self.top_k is None else self.top_k,
            top_p=default.top_p if self.top_p is None else self.top_p,
            seed=self.chosen_seed(),
            stop=self.stop,
            ignore_eos=self.ignore_eos,
            grammar=self.grammar,
        )
        params = SamplingParams.from_data(params.as_data() | dict(self.more))
        message = wire.sampling_to_proto(params)
        for name in ("max_tokens", "top_k", "top_p"):
            if getattr(self, name) is None:
                message.ClearField(name)
        return message


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """Result of a request: one answer, and `others` if several were requested."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    prompt_len: int
    seed: int
    ttft_ms: float
    tpot_ms: float
    num_verify_steps: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_decode_tokens: int = 0
    kv_bytes_pushed: int = 0
    kv_bytes_landed_before_prefill_end: int = 0
    num_cached_tokens: int = 0
    num_handoff_retries: int = 0
    num_migrations: int = 0
    num_forced_tokens: int = 0
    path: str = ""
    kv_data_path: str = ""
    routing: str = ""
    num_expected_cached_tokens: int = 0
    prefill_worker: str = ""
    decode_worker: str = ""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    waterfall: dict[str, Any] | None = None  # from a deployment only: see `wire.waterfall_data`
    others: tuple["Completion", ...] = ()

    def as_data(self) -> dict[str, Any]:
        """Return JSON-able data; with several answers `choices` lists all of them."""
        data = asdict(self) | {"token_ids": list(self.token_ids)}
        del data["others"]
        for name in ("logprobs", "prompt_logprobs", "waterfall"):
            if data[name] is None:
                del data[name]
        if self.others:
            data["choices"] = [replace(self, others=()).as_data(), *(other.as_data() for other in self.others)]
        return data


class Interrupted(Exception):
    """A stream ended with an error after part of it had arrived.

    Attributes:
        error: error that ended it.
        text: text that had arrived.
        token_ids: tokens that had arrived.
    """

    def __init__(self, error: BatonError, text: str, token_ids: list[int]) -> None:
        super().__init__(error.message)
        self.error = error
        self.text = text
        self.token_ids = token_ids


@dataclass(slots=True)
class _Answer:
    """One answer as it arrives."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: inference_pb2.Finish | None = None

    def take(self, chunk: inference_pb2.GenerateChunk) -> None:
        assert chunk.index == len(self.token_ids), "a token was lost or doubled on the way"
        self.token_ids.extend(chunk.token_ids)
        self.text.append(chunk.text)
        self.logprobs.extend(map(wire.logprobs_from_proto, chunk.logprobs))
        self.prompt_logprobs.extend(map(wire.logprobs_from_proto, chunk.prompt_logprobs))
        if chunk.HasField("finish"):
            self.finish = chunk.finish


def complete_remotely(address: str, asked: CompletionArguments, on_text: OnText) -> Completion:
    """Send a request to a deployment; `on_text` is called with pieces of the (first) answer's text.

    Raises:
        BatonError: the request was refused, or failed before the first token.
        Interrupted: the request failed after the first token.
    """
    request = generate_request(asked.prompt, None, asked.sampling(), "")
    answers = [_Answer() for _ in range(min(max(request.sampling.n, 1), MAX_CHOICES))]
    first = answers[0]
    with open_channel(address) as channel:
        stream = inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=asked.timeout_s)
        try:
            for chunk in stream:
                answers[chunk.choice].take(chunk)
                if chunk.choice == 0:
                    on_text(chunk.text)
                if all(answer.finish is not None for answer in answers):
                    completion, *others = [_completion(answer, request.sampling) for answer in answers]
                    return replace(completion, others=tuple(others))
        except grpc.RpcError as failure:
            error = error_from_rpc(failure, address)
            if isinstance(error, StartupError) and error.fields.get("timed_out"):
                message = f"no complete answer within {asked.timeout_s:g} s"
                error = RequestDeadlineExceeded(message, timeout_s=asked.timeout_s)
            if first.token_ids:
                raise Interrupted(error, "".join(first.text), first.token_ids) from failure
            raise error from failure
    raise Interrupted(TransferFailed("the stream ended without a finish"), "".join(first.text), first.token_ids)


def _completion(answer: _Answer, asked: inference_pb2.Sampling) -> Completion:
    finish = answer.finish
    assert finish is not None
    stats = finish.stats
    return Completion(
        text="".join(answer.text),
        token_ids=tuple(answer.token_ids),
        finish_reason=finish.reason,
        prompt_len=stats.prompt_len,
        seed=stats.seed,
        ttft_ms=stats.ttft_ms,
        tpot_ms=stats.tpot_ms,
        num_verify_steps=stats.num_verify_steps,
        num_draft_tokens=stats.num_draft_tokens,
        num_accepted_tokens=stats.num_accepted_tokens,
        num_decode_tokens=stats.num_decode_tokens,
        kv_bytes_pushed=stats.kv_bytes_pushed,
        kv_bytes_landed_before_prefill_end=stats.kv_bytes_landed_before_prefill_end,
        num_cached_tokens=stats.num_cached_tokens,
        num_handoff_retries=stats.num_handoff_retries,
        num_migrations=stats.num_migrations,
        num_forced_tokens=stats.num_forced_tokens,
        path=stats.path,
        kv_data_path=stats.kv_data_path,
        routing=stats.routing,
        num_expected_cached_tokens=stats.num_expected_cached_tokens,
        prefill_worker=stats.prefill_worker,
        decode_worker=stats.decode_worker,
        waterfall=wire.waterfall_data(stats),
        logprobs=tuple(answer.logprobs) if asked.HasField("logprobs") else None,
        prompt_logprobs=tuple(answer.prompt_logprobs) if answer.prompt_logprobs else None,
    )
