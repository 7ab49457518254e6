"""Messages to core types and back; errors through a real RPC."""

import dataclasses
import math

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import (
    BatonError,
    InvalidGrammar,
    InvalidSampling,
    InvalidText,
    MalformedMessage,
    NoWorker,
    Overloaded,
    PromptTooLong,
    RequestDeadlineExceeded,
    WorkerLost,
)
from baton.core.requests.request import AttemptKey, GenerationRequest, TokenLogprobs
from baton.core.requests.sampling import GrammarSpec, SamplingParams
from baton.core.telemetry.span import new_trace, of_attempt
from baton.proto import inference_pb2, inference_pb2_grpc, wire, worker_pb2

pytestmark = pytest.mark.fast
PEER = worker_pb2.Peer(worker_id="d", kv_address="tcp://h:1", epoch=2)


@pytest.mark.long
@given(
    max_tokens=st.integers(-(2**31), 2**31 - 1),
    temperature=st.floats(allow_nan=False),
    top_k=st.integers(-(2**31), 2**31 - 1),
    top_p=st.floats(allow_nan=False),
    seed=st.integers(-(2**63), 2**63 - 1),
    stop=st.lists(st.text(), max_size=3).map(tuple),
    stop_token_ids=st.lists(st.integers(0, 2**32 - 1), max_size=3).map(tuple),
    ignore_eos=st.booleans(),
    min_p=st.floats(allow_nan=False),
    top_a=st.floats(allow_nan=False),
    min_tokens=st.integers(-(2**31), 2**31 - 1),
    logit_bias=st.lists(st.tuples(st.integers(0, 2**32 - 1), st.floats(allow_nan=False)), max_size=3).map(tuple),
    repetition_penalty=st.floats(allow_nan=False),
    presence_penalty=st.floats(allow_nan=False),
    frequency_penalty=st.floats(allow_nan=False),
    bad_words=st.lists(st.lists(st.integers(0, 2**32 - 1), max_size=3).map(tuple), max_size=3).map(tuple),
    allowed_token_ids=st.none() | st.lists(st.integers(0, 2**32 - 1), max_size=3).map(tuple),
    logprobs=st.none() | st.integers(-(2**31), 2**31 - 1),
    prompt_logprobs=st.none() | st.integers(-(2**31), 2**31 - 1),
    n=st.integers(-(2**31), 2**31 - 1),
    grammar=st.one_of(
        st.none(),
        st.just(GrammarSpec("json_object")),
        st.builds(GrammarSpec, st.sampled_from(["json_schema", "regex", "grammar"]), st.text()),
    ),
)
def test_sampling_goes_round_as_it_is(**values):
    sampling = SamplingParams(**values)
    message = inference_pb2.Sampling.FromString(wire.sampling_to_proto(sampling).SerializeToString())
    assert wire.sampling_from_proto(message) == sampling
    assert wire.sampling_from_client(message, room_len=5, draw_seed=lambda: 9) == sampling


def test_nan_reaches_validation():
    for field in (
        "temperature",
        "top_p",
        "min_p",
        "top_a",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
    ):
        message = wire.sampling_to_proto(SamplingParams(**{field: math.nan}))
        with pytest.raises(InvalidSampling) as caught:
            wire.sampling_from_client(message, room_len=5, draw_seed=lambda: 9).validate(10)
        assert caught.value.fields["field"] == field


def test_numbers_too_wide_for_a_message_are_refused_not_wrapped():
    for field, value in (
        ("max_tokens", 2**31),
        ("top_k", -(2**31) - 1),
        ("seed", 2**63),
        ("stop_token_ids", (-1,)),
        ("max_tokens", 10**5000),
        ("temperature", 10**400),
        ("logit_bias", ((-1, 1.0),)),
        ("bad_words", ((1,), (-1,))),
        ("allowed_token_ids", (2**32,)),
        ("logprobs", 2**31),
        ("n", 2**31),
        ("min_tokens", 2**31),
    ):
        with pytest.raises(InvalidSampling, match=field) as caught:
            wire.sampling_to_proto(SamplingParams(**{field: value}))
        assert caught.value.fields == {"field": field}
    with pytest.raises(InvalidText):
        wire.sampling_to_proto(SamplingParams(stop=("\ud800",)))
    for spec in (GrammarSpec("regex", "\ud800"), GrammarSpec("form", "x"), GrammarSpec("yaml")):
        with pytest.raises(InvalidGrammar):
            wire.sampling_to_proto(SamplingParams(grammar=spec))


def test_what_a_client_leaves_out():
    assert wire.sampling_from_proto(inference_pb2.Sampling()) == SamplingParams()
    empty = inference_pb2.Sampling()
    for room_len, max_tokens in ((1000, 128), (128, 128), (7, 7), (0, 1), (-50, 1)):
        got = wire.sampling_from_client(empty, room_len=room_len, draw_seed=lambda: 42)
        assert got == SamplingParams(max_tokens=max_tokens, seed=42)
    assert not empty.HasField("seed"), "the client's message stays as it is"
    for nothing in (inference_pb2.Grammar(), inference_pb2.Grammar(json_object=False)):
        assert wire.sampling_from_proto(inference_pb2.Sampling(grammar=nothing)).grammar is None
    zeros = inference_pb2.Sampling(max_tokens=0, temperature=0, top_p=0, seed=0)
    got = wire.sampling_from_client(zeros, room_len=9, draw_seed=lambda: 42)
    assert (got.max_tokens, got.temperature, got.top_p, got.seed) == (0, 0.0, 0.0, 0), "zero is not absent"


def test_logprobs_go_round():
    report = TokenLogprobs(7, -0.1234567890123, 3, ((1, -0.1), (2, -20.5)))
    message = inference_pb2.TokenLogprobs.FromString(wire.logprobs_to_proto(report).SerializeToString())
    assert wire.logprobs_from_proto(message) == report
    message.top_logprobs.append(1.0)
    with pytest.raises(MalformedMessage):
        wire.logprobs_from_proto(message)


def request(timeout_s=2.5):
    return GenerationRequest(
        key=AttemptKey("r", 3),
        prompt_token_ids=(1, 2),
        sampling=SamplingParams(max_tokens=4, seed=8, stop=("a",)),
        deadline_s=10.0 + timeout_s,
        tenant="t",
        num_draft_tokens=2,
        choice=1,
        num_forced=1,
    )


def test_requests_carry_the_time_that_is_left():
    prefill = wire.prefill_request(request(), PEER, now_s=10.0)
    assert prefill.timeout_ms == 2500
    assert prefill.decode == PEER
    want = GenerationRequest(**{name: getattr(request(), name) for name in GenerationRequest.__slots__})
    assert wire.request_from_prefill(prefill, now_s=10.0) == want
    attend = wire.attend_request(request(), now_s=10.0)
    assert wire.request_from_attend(attend, now_s=10.0) == want
    assert wire.request_from_attend(attend, now_s=0.0).deadline_s == 2.5, "each side has its own clock"
    assert wire.attend_request(request(-1.0), now_s=10.0).timeout_ms == 1
    assert wire.attend_request(request(1e9), now_s=10.0).timeout_ms == 2**32 - 1


def test_both_workers_are_given_the_context_of_the_attempt():
    asked = dataclasses.replace(request(), trace=new_trace())
    prefill = wire.prefill_request(asked, PEER, now_s=10.0)
    attend = wire.attend_request(asked, now_s=10.0)
    attempt = of_attempt(asked.trace, "r", 3)
    assert prefill.traceparent == attend.traceparent == attempt != str(asked.trace)
    assert str(wire.request_from_prefill(prefill, now_s=10.0).trace) == attempt
    assert str(wire.request_from_attend(attend, now_s=10.0).trace) == attempt
    later = dataclasses.replace(asked, key=AttemptKey("r", 4))
    assert wire.attend_request(later, now_s=10.0).traceparent not in ("", attempt)
    assert wire.attend_request(request(), now_s=10.0).traceparent == ""
    for header in ("", "nonsense", attempt[:-1] + "0"):
        attend.traceparent = header
        assert wire.request_from_attend(attend, now_s=10.0).trace is None


@pytest.mark.parametrize("field", ["attempt", "prompt_token_ids", "timeout_ms", "decode"])
def test_messages_that_lack_something(field):
    prefill = wire.prefill_request(request(), PEER, now_s=10.0)
    attend = wire.attend_request(request(), now_s=10.0)
    prefill.ClearField(field)
    with pytest.raises(MalformedMessage) as caught:
        wire.request_from_prefill(prefill, now_s=0.0)
    assert caught.value.fields["field"].startswith(field)
    if field != "decode":
        attend.ClearField(field)
        with pytest.raises(MalformedMessage):
            wire.request_from_attend(attend, now_s=0.0)


class Failing(inference_pb2_grpc.InferenceServicer):
    """Fails as told: with an error of ours, or a bare status."""

    def __init__(self):
        self.failure = None
        self.metadata = ()

    async def Tokenize(self, request, context):
        if isinstance(self.failure, BatonError):
            await wire.abort_with(context, self.failure)
        await context.abort(self.failure, "bare", self.metadata)


@pytest.mark.asyncio
async def test_errors_through_a_real_rpc():
    service, server = Failing(), grpc.aio.server(options=(("grpc.so_reuseport", 0),))
    inference_pb2_grpc.add_InferenceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)

        async def call():
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Tokenize(inference_pb2.TokenizeRequest(), timeout=5.0)
            return caught.value.code(), wire.error_from_rpc(caught.value)

        service.failure = Overloaded("voll: ü 🎉", limit=3)
        code, error = await call()
        assert (code, type(error), error.message) == (grpc.StatusCode.RESOURCE_EXHAUSTED, Overloaded, "voll: ü 🎉")
        assert error.fields == {"limit": 3}
        service.failure = PromptTooLong("x" * 100_000 + "\ud800", limit=3, prompt="é" * 10_000)
        code, error = await call()
        assert (code, type(error), error.message) == (grpc.StatusCode.INVALID_ARGUMENT, PromptTooLong, "x" * 300)
        service.failure = NoWorker("\ud800")
        assert type((await call())[1]) is NoWorker
        for bare, kind in (
            (grpc.StatusCode.UNAVAILABLE, WorkerLost),
            (grpc.StatusCode.DEADLINE_EXCEEDED, RequestDeadlineExceeded),
            (grpc.StatusCode.RESOURCE_EXHAUSTED, Overloaded),
            (grpc.StatusCode.DATA_LOSS, BatonError),
        ):
            service.failure = bare
            code, error = await call()
            assert (code, type(error), error.message) == (bare, kind, f"{bare.name}: bare")
        service.metadata = ((wire.ERROR_KEY, "not json"),)
        assert type((await call())[1]) is MalformedMessage
    await server.stop(None)
