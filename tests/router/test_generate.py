"""Whole requests through a real router and scripted workers: what goes well, and what a client can do wrong."""

import asyncio
import math

import grpc
import pytest

from baton.client import AsyncBatonClient
from baton.core.errors import (
    EmptyPrompt,
    InvalidRequest,
    InvalidSampling,
    InvalidText,
    MalformedMessage,
    ModelNotFound,
    NoWorker,
    Overloaded,
    PromptTooLong,
    ProtocolError,
)
from baton.core.requests.sampling import SamplingParams
from baton.proto import inference_pb2, inference_pb2_grpc, wire
from baton.router.inference import BASE_BYTES, BYTES_PER_POSITION
from baton.tests.inside import router_channel
from baton.tests.router.fakes import OFF, TOKENIZER, cluster, decode_tokens, finished

pytestmark = pytest.mark.asyncio
GREEDY = SamplingParams(max_tokens=64, temperature=0.0)


async def chunks_of(running, prompt="hi", **more):
    async with AsyncBatonClient(running.address, timeout_s=10.0) as client:
        return [chunk async for chunk in client.generate(prompt, **({"sampling": GREEDY} | more))]


def text_of(chunks):
    return "".join(chunk.text for chunk in chunks)


@pytest.mark.fast
async def test_an_answer_its_indexes_and_its_stats():
    async with cluster() as running:
        running.script.answer = "héllo wörld"
        chunks = await chunks_of(running)
        want = TOKENIZER.encode("héllo wörld")
        assert text_of(chunks) == "héllo wörld"
        assert [token for chunk in chunks for token in chunk.token_ids] == want
        assert len({chunk.request_id for chunk in chunks}) == 1
        finish = chunks[-1].finish
        assert finish.reason == "length"
        stats = finish.stats
        assert (stats.prompt_len, stats.output_len, stats.num_decode_tokens) == (2, len(want), len(want) - 1)
        assert stats.num_verify_steps == math.ceil(stats.num_decode_tokens / running.script.step)
        assert len(chunks) <= 1 + stats.num_verify_steps, "a reader that is behind gets several steps at once"
        assert (stats.prefill_worker, stats.decode_worker) == ("prefill-0", "decode-0")
        assert stats.handoff_ms == 4.0
        assert (stats.tpot_ms > 0) == (len(chunks) > 1), "tokens that leave in one chunk leave at once"
        assert (stats.kv_bytes_pushed, stats.kv_bytes_landed_before_prefill_end) == (4096, 1024)
        prefill, decode = await running.idle()
        sent = prefill[0].request
        assert (sent.attempt, sent.sampling) == (decode[0].request.attempt, decode[0].request.sampling)
        assert sent.decode.epoch == running.of("decode")[0].epoch
        assert 9_000 < sent.timeout_ms < 10_500  # gRPC rounds a deadline up on its way
        assert sent.num_draft_tokens == 2


@pytest.mark.fast
async def test_a_tenant_reaches_the_prefill_worker_and_what_it_had_comes_back():
    async with cluster() as running:
        stats = [(await chunks_of(running, "hello", tenant=tenant))[-1].finish.stats for tenant in ("", "one")]
        prefill, _ = await running.idle()
        assert [seen.request.tenant for seen in prefill] == ["", "one"]
        assert [each.num_cached_tokens for each in stats] == [3, 3]
        with pytest.raises(InvalidRequest, match="at most 256"):
            await chunks_of(running, "hello", tenant="x" * 257)
        with pytest.raises(InvalidText, match="tenant"):
            await chunks_of(running, "hello", tenant="\ud800")


@pytest.mark.fast
async def test_the_parts_of_the_first_tokens_time_are_its_whole():
    async with cluster() as running:
        running.script.first_delay_s = 0.03
        stats = (await chunks_of(running))[-1].finish.stats
        parts = [stats.router_ms, stats.queue_ms, stats.grant_wait_ms, stats.prefill_ms, stats.publish_ms]
        assert min(parts) > 0
        assert stats.queue_ms + stats.grant_wait_ms + stats.prefill_ms >= 29.0, "30, and timers ring a little early"
        assert sum(parts) == pytest.approx(stats.ttft_ms, rel=0.01, abs=0.2)


@pytest.mark.fast
async def test_the_first_token_does_not_wait_for_the_hand_over():
    async with cluster() as running:
        running.script.done_delay_s = 60.0
        running.script.decode_hangs_after = 0
        async with AsyncBatonClient(running.address) as client:
            stream = client.generate("hi", sampling=GREEDY)
            first = await asyncio.wait_for(anext(stream), 10.0)
            assert (first.index, first.text) == (0, "h")
            await stream.aclose()


async def test_decode_may_overtake_the_first_token():
    async with cluster() as running:
        running.script.decode_before_first = True
        chunks = await chunks_of(running)
        assert text_of(chunks) == "hello world"
        lens = [len(chunk.token_ids) for chunk in chunks]
        assert [chunk.index for chunk in chunks] == [sum(lens[:at]) for at in range(len(lens))]


async def test_a_late_done_does_not_delay_the_end():
    async with cluster() as running:
        running.script.done_delay_s = 1.0
        chunks = await chunks_of(running)
        prefill = running.of("prefill")[0].seen
        assert not prefill[0].ended.is_set()
        assert chunks[-1].finish.stats.kv_bytes_pushed == 4096, "what landed was pushed"
        await running.idle()
        assert not prefill[0].cancelled, "after the commit nobody cancels"


async def test_a_request_that_ends_at_its_first_token():
    async with cluster() as running:
        running.script.finish_at_first = "stop"
        running.script.decode_hangs_after = 0
        chunks = await chunks_of(running)
        assert len(chunks) == 1
        assert chunks[0].finish.reason == "stop"
        stats = chunks[0].finish.stats
        assert (stats.output_len, stats.decode_worker, stats.tpot_ms, stats.num_decode_tokens) == (1, "", 0.0, 0)
        prefill, decode = await running.idle()
        assert decode[0].cancelled
        assert not prefill[0].cancelled


@pytest.mark.parametrize(
    ("events", "why"),
    [
        ([decode_tokens(1, [1]), decode_tokens(3, [1])], "skipped"),
        ([decode_tokens(1, [1, 2]), decode_tokens(2, [3])], "another value"),
        ([decode_tokens(1, [1] * 64)], "more than"),
        ([finished(decode_tokens(1, [1, 2]), 3)], "emitted 4"),
        ([decode_tokens(1, [1])], "without a finish"),
        ([finished(decode_tokens(1, [1]), 1, reason="tired")], "no reason"),
    ],
)
@pytest.mark.parametrize("before_first", [False, True])
async def test_a_decode_worker_that_contradicts_itself_fails_the_request(events, why, before_first):
    async with cluster() as running:
        running.script.events = events
        running.script.decode_before_first = before_first
        running.script.events_end = why == "without a finish"
        with pytest.raises(ProtocolError, match=why):
            await chunks_of(running)
        await running.idle()


async def test_tokens_that_come_twice_are_streamed_once():
    async with cluster() as running:
        running.script.events = [
            decode_tokens(1, [71, 72]),
            decode_tokens(1, [71, 72]),
            decode_tokens(2, [72, 73]),
            finished(decode_tokens(4, []), 3),
        ]
        chunks = await chunks_of(running)
        token_ids = [token for chunk in chunks for token in chunk.token_ids]
        assert token_ids == [*TOKENIZER.encode("h"), 71, 72, 73]
        lens = [len(chunk.token_ids) for chunk in chunks]
        assert [chunk.index for chunk in chunks] == [sum(lens[:at]) for at in range(len(lens))]


async def test_stop_strings_end_the_text_before_them():
    async with cluster() as running:
        running.script.answer = "say stop here"
        script = TOKENIZER.encode("say stop")
        running.script.events = [
            decode_tokens(1, script[1:5]),
            finished(decode_tokens(5, script[5:]), 7, reason="stop"),
        ]
        chunks = await chunks_of(running, sampling=SamplingParams(max_tokens=64, temperature=0.0, stop=("stop",)))
        assert text_of(chunks) == "say "
        assert chunks[-1].finish.reason == "stop"
        assert chunks[-1].finish.stats.output_len == 8


async def test_two_requests_interleave_and_workers_take_turns():
    async with cluster(num_prefill=2, num_decode=3) as running:
        running.script.token_delay_s = 0.01
        answers = await asyncio.gather(*(chunks_of(running) for _ in range(6)))
        assert {text_of(chunks) for chunks in answers} == {"hello world"}
        assert len({chunks[0].request_id for chunks in answers}) == 6
        assert [len(worker.seen) for worker in running.workers] == [3, 3, 2, 2, 2]


async def test_absent_sampling_takes_the_defaults_and_a_seed_that_is_reported():
    async with cluster() as running:
        chunks = [await chunks_of(running, sampling=None) for _ in range(2)]
        prefill, _ = await running.idle()
        asked = [seen.request.sampling for seen in prefill]
        assert [sampling.seed for sampling in asked] == [answer[-1].finish.stats.seed for answer in chunks]
        assert asked[0].seed != asked[1].seed
        assert (asked[0].max_tokens, asked[0].temperature, asked[0].top_p) == (128, 1.0, 1.0)
        await chunks_of(running, "x" * 100, sampling=None)
        prefill, _ = await running.idle()
        assert prefill[-1].request.sampling.max_tokens == 160 - 2 - 100, "what fits the decode worker's pool"


async def test_a_client_may_name_its_request_twice():
    async with cluster() as running:
        stub = inference_pb2_grpc.InferenceStub(running.channel)
        for _ in range(2):
            request = inference_pb2.GenerateRequest(text="hi", request_id="mine")
            assert {chunk.request_id async for chunk in stub.Generate(request)} == {"mine"}
        prefill, _ = await running.idle()
        ids = [seen.request.attempt.request_id for seen in prefill]
        assert len(set(ids)) == 2
        assert all(name.startswith("mine-") for name in ids)


SAMPLINGS = [
    {"max_tokens": 0},
    {"max_tokens": -1},
    {"max_tokens": 2**40},
    {"temperature": math.nan},
    {"temperature": -0.1},
    {"temperature": math.inf},
    {"top_p": math.nan},
    {"top_p": 0.0},
    {"top_p": 1.5},
    {"top_k": -1},
    {"seed": -1},
    {"seed": 2**63},
    {"stop": ("",)},
    {"stop_token_ids": (257,)},
    {"stop_token_ids": (-1,)},
]


@pytest.mark.fast
async def test_bad_requests_are_named_and_reach_no_worker():
    async with cluster() as running, AsyncBatonClient(running.address, timeout_s=5.0) as client:

        async def refused(kind, prompt="hi", **more):
            with pytest.raises(kind) as caught:
                await client.generate_text(prompt, **more)
            assert type(caught.value) is kind
            return caught.value

        for values in SAMPLINGS:
            await refused(InvalidSampling, sampling=SamplingParams(**values))
        error = await refused(ModelNotFound, model="other")
        assert error.fields == {"model": "other", "served": "toy"}
        await refused(EmptyPrompt, "")
        await refused(EmptyPrompt, None, token_ids=[])
        await refused(InvalidText, "\ud800")
        await refused(InvalidText, sampling=SamplingParams(stop=("\ud800",)))
        await refused(InvalidRequest, None, token_ids=[1, 257])
        await refused(InvalidRequest, None, token_ids=[-1])
        await refused(PromptTooLong, "x" * 200)
        await refused(PromptTooLong, "x" * 161, sampling=SamplingParams(max_tokens=1))
        error = await refused(PromptTooLong, "x" * 100, sampling=SamplingParams(max_tokens=59))
        assert error.fields == {"length": 159, "limit": 158}
        await refused(PromptTooLong, "x", sampling=SamplingParams(max_tokens=2**31 - 1))
        assert not any(worker.seen for worker in running.workers)
        status = await client.status()
        assert (status.num_requests_finished, status.num_requests_running) == (0, 0)
        assert (status.num_requests_failed, status.num_requests_refused > 0) == (0, True)


@pytest.mark.fast
async def test_more_drafts_than_the_deployment_makes_and_no_prompt_at_all():
    async with cluster() as running:
        stub = inference_pb2_grpc.InferenceStub(running.channel)
        for request, kind in [
            (inference_pb2.GenerateRequest(text="hi", num_draft_tokens=3), InvalidRequest),
            (inference_pb2.GenerateRequest(), EmptyPrompt),
            (inference_pb2.GenerateRequest(text="hi", request_id="x" * 129), InvalidRequest),
        ]:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in stub.Generate(request):
                    pass
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert type(wire.error_from_rpc(caught.value)) is kind


RAW = [
    ("/baton.v1.Inference/Generate", True, b"\xff\xff\xff", MalformedMessage, None),
    ("/baton.v1.Inference/Generate", True, b"\x12\x05ab", MalformedMessage, None),
    ("/baton.v1.Inference/Generate", True, b"\x12\x02\xff\xfe", InvalidText, "text"),
    ("/baton.v1.Inference/Generate", True, b"\x22\x04\x32\x02\xff\xfe", InvalidText, "sampling.stop"),
    ("/baton.v1.Inference/Tokenize", False, b"\x12\x01\xff", InvalidText, "text"),
    ("/baton.v1.Membership/Heartbeat", False, b"\x0a\x01\xff", InvalidText, "worker_id"),
    ("/baton.v1.Admin/Status", False, b"\xff", MalformedMessage, None),
    ("/grpc.health.v1.Health/Check", False, b"\xff", MalformedMessage, None),
]


@pytest.mark.fast
async def test_bytes_that_are_no_message_get_a_typed_refusal():
    async with cluster() as running:
        for path, streams, data, kind, field in RAW:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                channel = router_channel(running.channel, "prefill", "p", running.router.callee)
                if streams:
                    async for _ in channel.unary_stream(path)(data, timeout=2.0):
                        pass
                else:
                    await channel.unary_unary(path)(data, timeout=2.0)
            error = wire.error_from_rpc(caught.value)
            assert (caught.value.code(), type(error)) == (grpc.StatusCode.INVALID_ARGUMENT, kind), path
            assert error.fields.get("field") == field
        assert text_of(await chunks_of(running)) == "hello world"


async def test_beyond_the_limit_requests_are_refused_at_once():
    async with cluster(max_queue_len=2) as running:
        running.script.decode_hangs_after = 0
        async with AsyncBatonClient(running.address) as client:
            held = [client.generate("hi", sampling=GREEDY) for _ in range(2)]
            for stream in held:
                await anext(stream)
            with pytest.raises(Overloaded) as caught:
                await client.generate_text("hi")
            assert caught.value.fields == {"limit": 2, "retry_after_s": 1.0}
            for stream in held:
                await stream.aclose()
            await running.idle()
            running.script.decode_hangs_after = None
            assert await client.generate_text("hi", sampling=GREEDY) == "hello world"


async def test_without_a_worker_of_each_role_the_role_is_named():
    for missing in ("prefill", "decode"):
        counts = {f"num_{missing}": 0}
        async with cluster(**counts) as running:
            with pytest.raises(NoWorker) as caught:
                await chunks_of(running)
            assert caught.value.fields == {"role": missing}
            with pytest.raises(InvalidSampling):
                await chunks_of(running, sampling=SamplingParams(top_k=-1))


LIMIT_BYTES = BASE_BYTES + BYTES_PER_POSITION * 200


@pytest.mark.fast
async def test_what_cannot_fit_is_refused_before_it_is_tokenized(monkeypatch):
    async with cluster() as running, AsyncBatonClient(running.address, timeout_s=5.0) as client:
        tokenized = []
        encode = TOKENIZER.encode
        counted = lambda text, **more: tokenized.append(len(text)) or encode(text, **more)  # noqa: E731
        monkeypatch.setattr(TOKENIZER, "encode", counted)
        for call in (client.generate_text, client.tokenize):
            with pytest.raises(PromptTooLong) as caught:
                await call("x" * LIMIT_BYTES)
            assert caught.value.fields["limit_bytes"] == LIMIT_BYTES < caught.value.fields["num_bytes"]
        with pytest.raises(PromptTooLong):
            await client.generate_text(token_ids=[1] * LIMIT_BYTES)
        with pytest.raises(InvalidSampling):
            await client.generate_text("x" * 1000, sampling=SamplingParams(top_k=-1))
        stub = inference_pb2_grpc.InferenceStub(running.channel)
        with pytest.raises(grpc.aio.AioRpcError, match="drafts"):
            await stub.Generate(inference_pb2.GenerateRequest(text="hi", num_draft_tokens=3)).read()
        assert tokenized == []
        assert len(await client.tokenize("x" * (LIMIT_BYTES - 100))) == LIMIT_BYTES - 100


async def test_without_workers_only_a_long_text_asks_for_them():
    async with cluster(0, 0) as running, AsyncBatonClient(running.address, timeout_s=5.0) as client:
        assert await client.tokenize("hi") == TOKENIZER.encode("hi")
        with pytest.raises(NoWorker):
            await client.tokenize("x" * (BASE_BYTES + 1))


async def test_several_answers_in_one_stream():
    async with cluster(num_prefill=2, num_decode=2) as running:
        running.script.answer = "hello world"
        async with AsyncBatonClient(running.address, timeout_s=10.0) as client:
            sampling = SamplingParams(max_tokens=64, temperature=0.0, n=3)
            chunks = [chunk async for chunk in client.generate("hi", sampling=sampling)]
            assert await client.generate_text("hi", sampling=sampling) == "hello world"
        for choice in range(3):
            own = [chunk for chunk in chunks if chunk.choice == choice]
            assert text_of(own) == "hello world"
            assert [chunk.HasField("finish") for chunk in own] == [False] * (len(own) - 1) + [True]
            assert own[-1].finish.stats.output_len == 11
        assert len({chunk.request_id for chunk in chunks}) == 1
        prefill, decode = await running.idle()
        first = [seen.request for seen in prefill if not seen.request.attempt.request_id.endswith((".1", ".2"))]
        assert len({seen.request.attempt.request_id for seen in prefill}) == 6
        assert [request.choice for request in first] == [0, 0]
        assert sorted(seen.request.choice for seen in decode) == [0, 0, 1, 1, 2, 2]


async def test_one_failed_answer_ends_all():
    async with cluster(migration=OFF) as running:
        running.script.decode_error = Overloaded("no")
        running.script.decode_error_after = 3
        running.script.decode_ends_when = at_once = asyncio.Event()
        at_once.set()
        with pytest.raises(Overloaded):
            await chunks_of(running, sampling=SamplingParams(max_tokens=64, temperature=0.0, n=4))
        await running.idle(5.0)
        with pytest.raises(InvalidSampling, match="n ="):
            await chunks_of(running, sampling=SamplingParams(n=0))


async def test_answers_count_against_the_limit():
    async with cluster(max_queue_len=3) as running:
        with pytest.raises(InvalidRequest, match="at most 3"):
            await chunks_of(running, sampling=SamplingParams(max_tokens=4, n=4))
        await chunks_of(running, sampling=SamplingParams(max_tokens=4, n=3))


async def test_log_probabilities_reach_the_client_and_must_be_complete():
    def report(token):
        return inference_pb2.TokenLogprobs(token_id=token, logprob=-0.5, rank=1)

    async with cluster() as running:
        running.script.logprobs = report
        sampling = SamplingParams(max_tokens=64, temperature=0.0, logprobs=0, prompt_logprobs=0)
        chunks = await chunks_of(running, sampling=sampling)
        assert [item.token_id for chunk in chunks for item in chunk.logprobs] == TOKENIZER.encode("hello world")
        assert all(len(chunk.logprobs) == len(chunk.token_ids) for chunk in chunks)
        assert [len(chunk.prompt_logprobs) for chunk in chunks if chunk.prompt_logprobs] == [1]
        running.script.logprobs = None
        with pytest.raises(ProtocolError):
            await chunks_of(running, sampling=sampling)


class GoneContext:
    """A call whose connection breaks at a write, before gRPC cancels it."""

    def __init__(self):
        self.num_writes = 0

    def invocation_metadata(self):
        return ()

    def time_remaining(self):
        return None

    async def write(self, chunk):
        self.num_writes += 1
        raise grpc.aio.InternalError("Failed execute_batch")


@pytest.mark.fast
async def test_a_connection_that_breaks_at_a_write_is_a_cancel_and_no_defect():
    async with cluster() as running:
        context = GoneContext()
        request = inference_pb2.GenerateRequest(text="hi", sampling=wire.sampling_to_proto(GREEDY))
        call = asyncio.create_task(running.router.inference.Generate(request, context))
        with pytest.raises(asyncio.CancelledError):
            await call
        assert context.num_writes == 1
        await running.idle()
        sample = running.router.metrics.registry.get_sample_value
        failed = [
            sample("baton_requests_failed_total", {"error": error}) for error in ("RequestCancelled", "InternalError")
        ]
        assert failed == [1, None]
