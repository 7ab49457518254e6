"""One completion, from a deployment or from this process, as the same record; `baton generate` prints it."""

import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import grpc

from baton.client.messages import generate_request
from baton.cluster.admin import error_from_rpc, open_channel
from baton.core.errors import BatonError, RequestDeadlineExceeded, StartupError, TransferFailed
from baton.core.sampling import GrammarSpec, SamplingParams
from baton.proto import inference_pb2, inference_pb2_grpc, wire

OnText = Callable[[str], None]
RANDOM_SEED_BITS = 62


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a request asks, before anything is known of the model; None means the server's default."""

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

    def chosen_seed(self) -> int:
        """The seed given, else 0 for greedy requests (which never draw), else a random one."""
        if self.seed is not None:
            return self.seed
        return 0 if self.temperature == 0 else secrets.randbits(RANDOM_SEED_BITS)

    def sampling(self) -> inference_pb2.Sampling:
        """As a message; what was left to the server is absent.

        Raises:
            InvalidSampling: a number that no message can carry.
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
        message = wire.sampling_to_proto(params)
        for name in ("max_tokens", "top_k", "top_p"):
            if getattr(self, name) is None:
                message.ClearField(name)
        return message


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What came back."""

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
    prefill_worker: str = ""
    decode_worker: str = ""

    def as_data(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self) | {"token_ids": list(self.token_ids)}


class Interrupted(Exception):
    """A stream ended with an error after part of it had arrived.

    Attributes:
        error: what ended it.
        text: what had arrived.
        token_ids: likewise.
    """

    def __init__(self, error: BatonError, text: str, token_ids: list[int]) -> None:
        super().__init__(error.message)
        self.error = error
        self.text = text
        self.token_ids = token_ids


def complete_remotely(address: str, asked: Asked, on_text: OnText) -> Completion:
    """Ask a deployment; `on_text` gets the text as it comes.

    Raises:
        BatonError: refused, or failed before the first token.
        Interrupted: failed after it.
    """
    request = generate_request(asked.prompt, None, asked.sampling(), "")
    text: list[str] = []
    token_ids: list[int] = []
    with open_channel(address) as channel:
        stream = inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=asked.timeout_s)
        try:
            for chunk in stream:
                assert chunk.index == len(token_ids), "a token was lost or doubled on the way"
                token_ids.extend(chunk.token_ids)
                text.append(chunk.text)
                on_text(chunk.text)
                if chunk.HasField("finish"):
                    return _completion(chunk.finish, "".join(text), token_ids)
        except grpc.RpcError as failure:
            error = error_from_rpc(failure, address)
            if isinstance(error, StartupError) and error.fields.get("timed_out"):
                message = f"no complete answer within {asked.timeout_s:g} s"
                error = RequestDeadlineExceeded(message, timeout_s=asked.timeout_s)
            if token_ids:
                raise Interrupted(error, "".join(text), token_ids) from failure
            raise error from failure
    raise Interrupted(TransferFailed("the stream ended without a finish"), "".join(text), token_ids)


def _completion(finish: inference_pb2.Finish, text: str, token_ids: list[int]) -> Completion:
    stats = finish.stats
    return Completion(
        text=text,
        token_ids=tuple(token_ids),
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
        prefill_worker=stats.prefill_worker,
        decode_worker=stats.decode_worker,
    )
