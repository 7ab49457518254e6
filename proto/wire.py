"""Between messages and core types: the one place that knows both, for the router, the workers and the client.

Values from outside are carried over as they are, so that validation can refuse them by name; what has no core type at
all (no request id, no deadline, a number too wide for its field) is refused here.
"""

import asyncio
import dataclasses
import functools
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, NoReturn, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from baton.core.block_hash import HASH_BYTES, BlockChange
from baton.core.distribution import Distribution
from baton.core.errors import (
    BatonError,
    InvalidGrammar,
    InvalidRequest,
    InvalidSampling,
    InvalidText,
    MalformedMessage,
    ModelNotFound,
    Overloaded,
    PermissionDenied,
    PromptTooLong,
    RequestCancelled,
    RequestDeadlineExceeded,
    Unauthenticated,
    WorkerLost,
    from_wire,
)
from baton.core.requests.answer_structure import GRAMMAR_KINDS, JSON_OBJECT
from baton.core.requests.request import AttemptKey, GenerationRequest, TokenLogprobs
from baton.core.requests.sampling import SCALAR_FIELDS, GrammarSpec, SamplingParams
from baton.core.telemetry.span import of_attempt, parse_sampled
from baton.core.telemetry.step_report import MethodCounts, RowCounts, StepReport
from baton.core.telemetry.waterfall import gap
from baton.proto import inference_pb2, kv_pb2, worker_pb2


def change_to_proto(change: BlockChange) -> worker_pb2.PrefixChange:
    """A change as a message; all its names have HASH_BYTES bytes."""
    assert all(len(name) == HASH_BYTES for name in (*change.stored[:1], *change.removed[:1]))
    return worker_pb2.PrefixChange(
        after=change.after,
        version=change.version,
        part=change.part,
        cleared=change.cleared,
        stored=b"".join(change.stored),
        removed=b"".join(change.removed),
        name_bytes=HASH_BYTES,
    )


def change_from_proto(message: worker_pb2.PrefixChange) -> BlockChange:
    """The change in a message.

    Raises:
        MalformedMessage: names of another length than this build makes, or half a name.
    """
    if message.name_bytes != HASH_BYTES:
        raise MalformedMessage(f"names of {message.name_bytes} bytes, not {HASH_BYTES}", field="name_bytes")
    return BlockChange(
        after=message.after,
        version=message.version,
        part=message.part,
        cleared=message.cleared,
        stored=_names(message.stored, "stored"),
        removed=_names(message.removed, "removed"),
    )


def _names(packed: bytes, field: str) -> tuple[bytes, ...]:
    if len(packed) % HASH_BYTES:
        raise MalformedMessage(f"{field} has {len(packed)} bytes, no multiple of {HASH_BYTES}", field=field)
    return tuple(packed[first : first + HASH_BYTES] for first in range(0, len(packed), HASH_BYTES))


def report_to_proto(report: StepReport) -> worker_pb2.StepCounts:
    """For a heartbeat."""
    return worker_pb2.StepCounts(
        num_steps=report.num_steps,
        computed=_rows_to_proto(report.computed),
        kept=_rows_to_proto(report.kept),
        cut=_rows_to_proto(report.cut),
        late=_rows_to_proto(report.late),
        failed=_rows_to_proto(report.failed),
        step_seconds=distribution_to_proto(report.step_s),
        host_gap_seconds=distribution_to_proto(report.host_gap_s),
        step_tokens=distribution_to_proto(report.step_tokens),
        step_sequences=distribution_to_proto(report.step_sequences),
        by_method=[
            worker_pb2.MethodCounts(
                method=name,
                num_steps=counts.num_steps,
                num_draft_tokens=counts.num_draft_tokens,
                num_accepted_tokens=counts.num_accepted_tokens,
            )
            for name, counts in report.by_method.items()
        ],
    )


def report_from_proto(message: worker_pb2.StepCounts) -> StepReport:
    """From a heartbeat.

    Raises:
        MalformedMessage: numbers in it do not fit together.
    """
    rows = [_rows_from_proto(item) for item in (message.computed, message.kept, message.cut)]
    rows += [_rows_from_proto(item) for item in (message.late, message.failed)]
    if len({len(item.proposed_at) for item in rows} | {len(item.accepted_at) for item in rows}) > 1:
        raise MalformedMessage("counts of decode steps with different numbers of drafts")
    computed, kept, cut, late, failed = rows
    return StepReport(
        num_steps=message.num_steps,
        computed=computed,
        kept=kept,
        cut=cut,
        late=late,
        failed=failed,
        step_s=distribution_from_proto(message.step_seconds),
        host_gap_s=distribution_from_proto(message.host_gap_seconds),
        step_tokens=distribution_from_proto(message.step_tokens),
        step_sequences=distribution_from_proto(message.step_sequences),
        by_method={
            item.method: MethodCounts(
                num_steps=item.num_steps,
                num_draft_tokens=item.num_draft_tokens,
                num_accepted_tokens=item.num_accepted_tokens,
            )
            for item in message.by_method
        },
    )


def waiting_to_proto(waiting: Mapping[str, int]) -> list[worker_pb2.Waiting]:
    """Requests by what they wait for."""
    return [worker_pb2.Waiting(reason=reason, num_requests=num) for reason, num in waiting.items()]


def _rows_to_proto(rows: RowCounts) -> worker_pb2.RowCounts:
    return worker_pb2.RowCounts(
        num_rows=rows.num_rows,
        num_tokens=rows.num_tokens,
        proposed_at=rows.proposed_at,
        accepted_at=rows.accepted_at,
    )


def _rows_from_proto(message: worker_pb2.RowCounts) -> RowCounts:
    return RowCounts(
        num_rows=message.num_rows,
        num_tokens=message.num_tokens,
        proposed_at=tuple(message.proposed_at),
        accepted_at=tuple(message.accepted_at),
    )


def distribution_to_proto(found: Distribution) -> worker_pb2.Distribution:
    """A histogram as a message."""
    return worker_pb2.Distribution(bounds=found.bounds, counts=found.counts, total=found.total)


def distribution_from_proto(message: worker_pb2.Distribution) -> Distribution:
    """The histogram in a message.

    Raises:
        MalformedMessage: its counts do not fit its bounds.
    """
    return Distribution.checked(message.bounds, message.counts, message.total)


DETAILS_KEY: Final = "grpc-status-details-bin"
NANOS: Final = 10**9


def retry_details(error: BatonError, code: int, message: str) -> tuple[tuple[str, bytes], ...]:
    """Trailing metadata for an error that knows when to try again; none for others.

    Args:
        error: its field `retry_after_s`, if it is a number of seconds, says when.
        code: of gRPC, the number.
        message: of the status; the two must say the same.
    """
    after_s = error.fields.get("retry_after_s")
    if not isinstance(after_s, int | float) or not math.isfinite(after_s) or after_s < 0:
        return ()
    info = error_details_pb2.RetryInfo()
    info.retry_delay.seconds, info.retry_delay.nanos = divmod(round(after_s * NANOS), NANOS)
    status = status_pb2.Status(code=code, message=message)
    status.details.add().Pack(info)
    return ((DETAILS_KEY, status.SerializeToString()),)


def retry_after_s(details: bytes) -> float | None:
    """Seconds in the details of a status; None if they say nothing of it, or are none."""
    try:
        status = status_pb2.Status.FromString(details)
    except DecodeError:
        return None
    info = error_details_pb2.RetryInfo()
    for detail in status.details:
        if detail.Unpack(info):
            return info.retry_delay.seconds + info.retry_delay.nanos / NANOS
    return None


def held(inventory: worker_pb2.Inventory) -> dict[str, int]:
    """How much of each countable resource; all zero when it holds nothing."""
    return {
        "blocks": inventory.num_blocks - inventory.num_blocks_free,
        "quarantined_blocks": inventory.num_blocks_quarantined,
        "incoming_transfers": inventory.num_kv_receives,
        "slots": inventory.num_slots_in_use,
        "attends": inventory.num_requests_held,
        "waiting_requests": inventory.num_requests_waiting,
        "running_requests": inventory.num_requests_running,
    }


def kv_cache_usage(inventory: worker_pb2.Inventory) -> float:
    """Share of its KV blocks that are held, 0 ... 1."""
    return held(inventory)["blocks"] / inventory.num_blocks if inventory.num_blocks else 0.0


Reply = TypeVar("Reply")
ERROR_KEY: Final = "baton-error"
MAX_ERROR_BYTES: Final = 4096  # gRPC refuses metadata beyond 8 KiB
MAX_TIMEOUT_MS: Final = (1 << 32) - 1
DEFAULT_MAX_TOKENS: Final = 128
_SAMPLING_FIELDS: Final = tuple(field.name for field in dataclasses.fields(SamplingParams) if field.name != "grammar")


def attempt_to_proto(key: AttemptKey) -> kv_pb2.Attempt:
    """An attempt's identity as a message."""
    return kv_pb2.Attempt(request_id=key.request_id, attempt=key.attempt)


def attempt_from_proto(message: kv_pb2.Attempt) -> AttemptKey:
    """The identity in a message.

    Raises:
        MalformedMessage: it names no request.
    """
    if not message.request_id:
        raise MalformedMessage("the message names no request", field="attempt.request_id")
    return AttemptKey(message.request_id, message.attempt)


def sampling_to_proto(sampling: SamplingParams) -> inference_pb2.Sampling:
    """Every field set.

    Raises:
        InvalidSampling: a number does not fit its field, so it is out of range too; or there is a grammar.
        InvalidText: a stop string is not Unicode text.
    """
    try:
        values = {name: getattr(sampling, name) for name in _SAMPLING_FIELDS}
        grammar = None if sampling.grammar is None else grammar_to_proto(sampling.grammar)
        fields = {name: _field_to_proto(name, value) for name, value in values.items()}
        return inference_pb2.Sampling(**fields, grammar=grammar)
    except UnicodeEncodeError as error:
        message = f"a stop string is not valid UTF-8 at character {error.start}"
        raise InvalidText(message, at=error.start) from error
    except (ValueError, OverflowError) as error:
        raise _misfit(sampling) from error


def sampling_from_proto(message: inference_pb2.Sampling) -> SamplingParams:
    """The values given, and the defaults of `SamplingParams` for those absent; nothing is checked."""
    values: dict[str, Any] = {name: getattr(message, name) for name in SCALAR_FIELDS if message.HasField(name)}
    if message.HasField("allowed_token_ids"):
        values["allowed_token_ids"] = tuple(message.allowed_token_ids.ids)
    return SamplingParams(
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        logit_bias=tuple((item.token_id, item.bias) for item in message.logit_bias),
        bad_words=tuple(tuple(word.ids) for word in message.bad_words),
        grammar=grammar_from_proto(message.grammar) if message.HasField("grammar") else None,
        **values,
    )


def grammar_to_proto(grammar: GrammarSpec) -> inference_pb2.Grammar:
    """A grammar as a message.

    Raises:
        InvalidGrammar: its kind has no field, or it is not Unicode text.
    """
    if grammar.kind == JSON_OBJECT:
        return inference_pb2.Grammar(json_object=True)
    if grammar.kind not in GRAMMAR_KINDS:
        raise InvalidGrammar(f"grammar: no kind {grammar.kind[:40]!r}", kind=grammar.kind[:40])
    message = inference_pb2.Grammar()
    try:
        setattr(message, grammar.kind, grammar.text)
    except UnicodeEncodeError as error:
        why = f"{grammar.kind}: not valid UTF-8 at character {error.start}"
        raise InvalidGrammar(why, kind=grammar.kind) from error
    return message


def grammar_from_proto(message: inference_pb2.Grammar) -> GrammarSpec | None:
    """The grammar in a message; None where it asks for none."""
    kind = message.WhichOneof("form")
    if kind is None:
        return None
    if kind == JSON_OBJECT:
        return GrammarSpec(kind) if message.json_object else None
    return GrammarSpec(kind, getattr(message, kind))


def sampling_from_client(
    message: inference_pb2.Sampling,
    *,
    room_len: int,
    draw_seed: Callable[[], int],
    default_max_tokens: int = DEFAULT_MAX_TOKENS,
) -> SamplingParams:
    """What a client asked, completed by the server: nothing is checked.

    Args:
        message: as the client sent it.
        room_len: positions left for the answer; an absent `max_tokens` takes no more than these.
        draw_seed: called when the client gave no seed.
        default_max_tokens: for an absent `max_tokens`, if they fit.
    """
    completed = inference_pb2.Sampling()
    completed.CopyFrom(message)
    if not completed.HasField("max_tokens"):
        completed.max_tokens = max(1, min(default_max_tokens, room_len))
    if not completed.HasField("seed"):
        completed.seed = draw_seed()
    return sampling_from_proto(completed)


def logprobs_to_proto(report: TokenLogprobs) -> inference_pb2.TokenLogprobs:
    """One token's report as a message."""
    return inference_pb2.TokenLogprobs(
        token_id=report.token_id,
        logprob=report.logprob,
        rank=report.rank,
        top_token_ids=[token_id for token_id, _ in report.top],
        top_logprobs=[logprob for _, logprob in report.top],
    )


def logprobs_from_proto(message: inference_pb2.TokenLogprobs) -> TokenLogprobs:
    """The report in a message.

    Raises:
        MalformedMessage: a token without a log-probability, or the reverse.
    """
    if len(message.top_token_ids) != len(message.top_logprobs):
        raise MalformedMessage("as many top tokens as log-probabilities are needed", field="top_logprobs")
    top = tuple(zip(message.top_token_ids, message.top_logprobs, strict=True))
    return TokenLogprobs(message.token_id, message.logprob, message.rank, top)


def prefill_request(request: GenerationRequest, decode: worker_pb2.Peer, now_s: float) -> worker_pb2.PrefillRequest:
    """What the router sends to a prefill worker; `now_s` is the clock that `request.deadline_s` is read from."""
    return worker_pb2.PrefillRequest(
        attempt=attempt_to_proto(request.key),
        prompt_token_ids=request.prompt_token_ids,
        sampling=_sent_sampling(request.sampling),
        decode=decode,
        num_draft_tokens=request.num_draft_tokens,
        timeout_ms=_timeout_ms(request, now_s),
        tenant=request.tenant,
        choice=request.choice,
        num_forced_tokens=request.num_forced,
        traceparent=of_attempt(request.trace, request.key.request_id, request.key.attempt),
    )


def attend_request(
    request: GenerationRequest, now_s: float, *, prefill_here: bool = False, num_queued_tokens: int = 0
) -> worker_pb2.AttendRequest:
    """What the router sends to a decode worker; `now_s` is the clock that `request.deadline_s` is read from.

    With `prefill_here` no other worker computes the prompt, and `num_queued_tokens` prompt tokens wait in the router's
    queue for this one.
    """
    return worker_pb2.AttendRequest(
        attempt=attempt_to_proto(request.key),
        prompt_token_ids=request.prompt_token_ids,
        sampling=_sent_sampling(request.sampling),
        num_draft_tokens=request.num_draft_tokens,
        timeout_ms=_timeout_ms(request, now_s),
        tenant=request.tenant,
        choice=request.choice,
        num_forced_tokens=request.num_forced,
        traceparent=of_attempt(request.trace, request.key.request_id, request.key.attempt),
        prefill_here=prefill_here,
        num_queued_tokens=num_queued_tokens,
        keeps_drafts=request.keeps_drafts,
    )


@functools.lru_cache(maxsize=4)  # both workers are sent the same
def _sent_sampling(sampling: SamplingParams) -> inference_pb2.Sampling:
    """To be copied into a message, never to be changed."""
    return sampling_to_proto(sampling)


def request_from_prefill(message: worker_pb2.PrefillRequest, now_s: float) -> GenerationRequest:
    """The request in a message that came at `now_s`.

    Raises:
        MalformedMessage: a required field is missing.
    """
    if not message.decode.worker_id or not message.decode.kv_address:
        raise MalformedMessage("the message names no decode worker", field="decode")
    return _request(message, now_s)


def request_from_attend(message: worker_pb2.AttendRequest, now_s: float) -> GenerationRequest:
    """The request in a message that came at `now_s`.

    Raises:
        MalformedMessage: a required field is missing.
    """
    return dataclasses.replace(_request(message, now_s), keeps_drafts=message.keeps_drafts)


def end_with(context: grpc.aio.ServicerContext[Any, Any], error: BatonError) -> None:
    """As `abort_with`, for a stream's method that returns now.

    gRPC's `abort` raises, and its exception and frames refer to each other: a server that refuses many requests a
    second would stop for the garbage collector again and again, a hundred times as long as a refusal takes.
    """
    code, message, metadata = _status(error)
    context.set_code(code)
    context.set_details(message)
    context.set_trailing_metadata(metadata)


def is_cancelled() -> bool:
    """Whether this task was cancelled; a CancelledError in one that was not is of something it waited for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def reply_of(call: Awaitable[Reply]) -> Reply:
    """The reply to a unary call.

    gRPC cancels the calls of a channel that is closed, and what waits for one sees that as its own cancellation: a
    server's method would end without a status, and its caller wait until the deadline.

    Raises:
        BatonError: what ended it; WorkerLost if its channel was closed.
    """
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error) from error
    except asyncio.CancelledError:
        if is_cancelled():
            raise
        raise WorkerLost("the connection was closed") from None


async def abort_with(context: grpc.aio.ServicerContext[Any, Any], error: BatonError) -> NoReturn:
    """End an RPC with a typed error: its gRPC code, its message, and all of it in trailing metadata, with RetryInfo."""
    await context.abort(*_status(error))
    raise AssertionError("abort returns by raising")


def _status(error: BatonError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str | bytes], ...]]:
    code = grpc.StatusCode[error.grpc_code]
    message = _short(error.message)
    return code, message, ((ERROR_KEY, bounded_wire(error)), *retry_details(error, code.value[0], message))


def error_from_rpc(error: grpc.RpcError) -> BatonError:
    """The typed error that ended an RPC, or the nearest one when the peer did not say.

    Without a type, `UNAVAILABLE` means that the connection broke or was never made: `WorkerLost`; and
    `RESOURCE_EXHAUSTED` that the message was longer than gRPC lets pass: `PromptTooLong`, or else `Overloaded`.
    """
    if not isinstance(error, grpc.Call | grpc.aio.AioRpcError):
        return BatonError(f"the call failed: {error}")
    metadata: Any = error.trailing_metadata()  # the stubs know only one of the two shapes it has
    found = dict(metadata or ())
    typed = _typed_error(error, found.get(ERROR_KEY))
    details = found.get(DETAILS_KEY)
    after_s = retry_after_s(details) if isinstance(details, bytes) else None
    if after_s is not None:
        typed.fields.setdefault("retry_after_s", after_s)  # a proxy's word, too, or where the fields were too long
    return typed


def _typed_error(error: grpc.Call | grpc.aio.AioRpcError, value: str | bytes | None) -> BatonError:
    if value is not None:
        try:
            return from_wire(value if isinstance(value, str) else value.decode("utf-8", "replace"))
        except MalformedMessage as malformed:
            return malformed
    code, details = error.code(), error.details() or ""
    kind = _KIND_OF_CODE.get(code, BatonError)
    if kind is Overloaded and "larger than max" in details:
        kind = PromptTooLong
    return kind(f"{code.name}: {details}", grpc_code=code.name)


_KIND_OF_CODE: Final[dict[grpc.StatusCode, type[BatonError]]] = {
    grpc.StatusCode.UNAVAILABLE: WorkerLost,
    grpc.StatusCode.CANCELLED: RequestCancelled,
    grpc.StatusCode.DEADLINE_EXCEEDED: RequestDeadlineExceeded,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: ModelNotFound,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
}


def _request(message: worker_pb2.PrefillRequest | worker_pb2.AttendRequest, now_s: float) -> GenerationRequest:
    if not message.prompt_token_ids:
        raise MalformedMessage("the message holds no prompt", field="prompt_token_ids")
    if not message.timeout_ms:
        raise MalformedMessage("the message holds no time limit", field="timeout_ms")
    return GenerationRequest(
        key=attempt_from_proto(message.attempt),
        prompt_token_ids=tuple(message.prompt_token_ids),
        sampling=sampling_from_proto(message.sampling),
        deadline_s=now_s + message.timeout_ms / 1e3,
        num_draft_tokens=message.num_draft_tokens,
        tenant=message.tenant,
        choice=message.choice,
        num_forced=message.num_forced_tokens,
        trace=parse_sampled(message.traceparent),
    )


def _field_to_proto(name: str, value: Any) -> Any:
    """What the message's constructor takes; None leaves a field absent."""
    match name:
        case "logit_bias":
            return [inference_pb2.LogitBias(token_id=token, bias=bias) for token, bias in value]
        case "bad_words":
            return [inference_pb2.TokenIds(ids=word) for word in value]
        case "allowed_token_ids" if value is not None:
            return inference_pb2.TokenIds(ids=value)
    return value


def _misfit(sampling: SamplingParams) -> InvalidSampling:
    for name in _SAMPLING_FIELDS:
        try:
            inference_pb2.Sampling(**{name: _field_to_proto(name, getattr(sampling, name))})
        except (ValueError, OverflowError) as error:
            return InvalidSampling(f"{name}: {error}"[:200], field=name)
    return InvalidSampling("a sampling value is out of range")


def _timeout_ms(request: GenerationRequest, now_s: float) -> int:
    return min(max(int((request.deadline_s - now_s) * 1e3), 1), MAX_TIMEOUT_MS)


def bounded_wire(error: BatonError) -> str:
    """An error as text that fits trailing metadata; its fields are left out where they are too long."""
    wire = error.to_wire()
    return wire if len(wire) <= MAX_ERROR_BYTES else type(error)(_short(error.message)).to_wire()


def _short(message: str) -> str:
    # A character takes at most 12 bytes in ASCII JSON, so this fits MAX_ERROR_BYTES; a lone surrogate fits no header.
    return message.encode("utf-8", "replace")[:300].decode("utf-8", "ignore")


FIRST: Final = ("router_ms", "queue_ms", "grant_wait_ms", "prefill_ms", "publish_ms")
SECOND: Final = ("retry_ms", "draft_ms", "transfer_ms", "verification_ms", "admission_ms", "step_ms", "publish_ms")


def waterfall_data(stats: inference_pb2.RequestStats) -> dict[str, Any]:
    """Return JSON-able data: `first` and, if present, `second`; each with `parts`, `sum_ms`, `total_ms` and `gap`."""
    parts = {name: getattr(stats, name) for name in FIRST}
    data: dict[str, Any] = {"shared_clock": stats.shared_clock, "first": _closed(parts, stats.ttft_ms)}
    if stats.HasField("second"):
        before = {name: value for name, value in parts.items() if name != "publish_ms"}
        later = {name: getattr(stats.second, name) for name in SECOND}
        data["second"] = _closed(before | later, stats.second.total_ms)
    return data


def _closed(parts: dict[str, float], total_ms: float) -> dict[str, Any]:
    sum_ms = sum(parts.values())
    return {"parts": parts, "sum_ms": sum_ms, "total_ms": total_ms, "gap": gap(sum_ms, total_ms)}
