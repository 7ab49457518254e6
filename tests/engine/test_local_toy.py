"""The engine on the toy model, against a loop that computes one token at a time and stores nothing."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.clock import VirtualClock
from baton.core.errors import EmptyPrompt, InvalidRequest, InvalidSampling, PromptTooLong, RequestDeadlineExceeded
from baton.core.requests.request import FinishReason
from baton.tests.engine import reference
from baton.tests.engine.toy import ToyModel
from baton.tests.engine.toy_engine import EOS, request_of, toy_engine

MODEL = ToyModel()


@functools.cache
def expected_tokens(prompt, params):
    return tuple(reference.generate(MODEL, prompt, params, (EOS,)))


def check(request, result):
    """Everything that must hold of any finished request."""
    assert result.error is None
    assert result.token_ids == expected_tokens(request.prompt_token_ids, request.sampling)
    ended_by_length = len(result.token_ids) == request.sampling.max_tokens
    last_stops = result.token_ids[-1] in {EOS, *request.sampling.stop_token_ids}
    assert result.finish_reason is (FinishReason.STOP if last_stops else FinishReason.LENGTH)
    assert last_stops or ended_by_length
    counts = result.counts
    assert counts.num_emitted_tokens == len(result.token_ids)
    assert counts.num_draft_tokens == counts.num_accepted_tokens + counts.num_rejected_tokens
    assert counts.num_accepted_tokens <= counts.num_emitted_tokens - 1
    # The first token is prefill's; every step emits what it accepted and one more, unless the end cut the bonus off.
    num_from_steps = counts.num_emitted_tokens - 1
    assert 0 <= counts.num_accepted_tokens + counts.num_verify_steps - num_from_steps <= 1


prompts = st.lists(st.integers(0, 22), min_size=1, max_size=37)
any_request = st.builds(
    request_of,
    prompts,
    k=st.integers(0, 4),
    max_tokens=st.integers(1, 12),
    temperature=st.sampled_from([0.0, 0.0, 0.7, 1.0]),
    top_k=st.sampled_from([0, 0, 3]),
    top_p=st.sampled_from([1.0, 1.0, 0.8]),
    seed=st.integers(0, 3),
    stop_token_ids=st.sampled_from([(), (1, 2)]),
)


arrangements = given(
    requests=st.lists(any_request, min_size=1, max_size=6),
    k=st.integers(0, 4),
    chunk_len=st.sampled_from([1, 3, 16, 64]),
    block_size=st.sampled_from([1, 4, 16]),
    max_num_sequences=st.integers(1, 5),
    num_positions=st.sampled_from([64, 160, 400]),
)


def check_arrangement(requests, k, chunk_len, block_size, max_num_sequences, num_positions):
    engine = toy_engine(
        MODEL,
        num_blocks=num_positions // block_size,
        block_size=block_size,
        k=k,
        chunk_len=chunk_len,
        max_num_sequences=max_num_sequences,
    )
    # What was never written must never be read.
    for layer in range(engine.pool.layout.num_layers):
        engine.pool.blocks(layer).fill_(torch.nan)
    for request, result in zip(requests, engine.generate(requests), strict=True):
        assert result.key == request.key
        check(request, result)


@settings(max_examples=60, deadline=None)
@arrangements
def test_tokens_in_any_arrangement(**arrangement):
    check_arrangement(**arrangement)


@pytest.mark.slow
@settings(max_examples=1500, deadline=None)
@arrangements
def test_tokens_in_many_arrangements(**arrangement):
    check_arrangement(**arrangement)


@pytest.mark.long
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("model", [ToyModel(with_mtp=True), ToyModel(with_mtp=False)])
@pytest.mark.parametrize("k", [*range(5), 6])
def test_every_k(k, model, temperature):
    if k and not model.with_mtp:
        with pytest.raises(AssertionError):
            toy_engine(model, k=k)
        return
    requests = [
        request_of([5, 6, at], k=k, max_tokens=20, temperature=temperature, seed=at, ignore_eos=True) for at in range(4)
    ]
    for request, result in zip(requests, toy_engine(model, k=k).generate(requests), strict=True):
        check(request, result) if EOS not in result.token_ids else None
        assert result.token_ids == expected_tokens(request.prompt_token_ids, request.sampling)


@pytest.mark.fast
@pytest.mark.long
def test_steps_are_saved_by_drafts_and_never_more_than_k():
    request = request_of([1, 2, 3], k=4, max_tokens=40, temperature=0.0, ignore_eos=True)
    [result] = toy_engine(k=4).generate([request])
    counts = result.counts
    assert 0 < counts.num_accepted_tokens < counts.num_draft_tokens
    assert counts.num_draft_tokens == 4 * counts.num_verify_steps
    assert counts.num_verify_steps < 39


@pytest.mark.fast
def test_a_request_may_ask_for_fewer_drafts_than_the_engine_allows():
    requests = [request_of([7, at], k=at, max_tokens=15, temperature=0.0, ignore_eos=True) for at in range(5)]
    for at, result in enumerate(toy_engine(k=3, max_num_sequences=5).generate(requests)):
        assert result.counts.num_draft_tokens == min(at, 3) * result.counts.num_verify_steps


@pytest.mark.fast
def test_no_drafts_means_no_mtp_pass_in_decode():
    model = ToyModel()
    toy_engine(model, k=2).generate([request_of([1, 2], k=0, max_tokens=9, ignore_eos=True)])
    assert model.num_mtp_calls == 1  # over the prompt: its KV is part of the layout


def test_eos_inside_accepted_drafts_ends_there():
    # A stop token at every place of the answer in turn, so that some fall inside an accepted run.
    params = dict(max_tokens=20, temperature=0.0, ignore_eos=True)
    whole = reference.generate(MODEL, [4, 9], request_of([4, 9], **params).sampling)
    for token in dict.fromkeys(whole):
        request = request_of([4, 9], k=4, stop_token_ids=(token,), **params)
        [result] = toy_engine(k=4).generate([request])
        assert list(result.token_ids) == whole[: whole.index(token) + 1]
        assert result.finish_reason is FinishReason.STOP
        assert result.counts.num_emitted_tokens == len(result.token_ids)
        assert result.counts.num_accepted_tokens <= len(result.token_ids) - 1


@pytest.mark.fast
def test_one_token_makes_no_decode_step():
    [result] = toy_engine().generate([request_of([3, 1], max_tokens=1)])
    assert len(result.token_ids) == 1
    assert result.finish_reason is FinishReason.LENGTH
    assert result.counts.num_verify_steps == 0
    assert result.ttft_s is not None
    assert result.tpot_s is None


def test_up_to_the_models_last_position():
    limit = MODEL.config.max_model_len
    for k in range(5):
        request = request_of(range(20), k=k, max_tokens=limit - 20, temperature=0.0, ignore_eos=True)
        [result] = toy_engine(k=k).generate([request])
        assert len(result.token_ids) == limit - 20
        assert result.token_ids == expected_tokens(request.prompt_token_ids, request.sampling)


@pytest.mark.fast
def test_a_pool_that_fits_exactly_and_one_block_less():
    request = request_of(range(10), k=2, max_tokens=10, ignore_eos=True)
    [result] = toy_engine(k=2, block_size=1, num_blocks=22).generate([request])
    assert len(result.token_ids) == 10
    with pytest.raises(PromptTooLong):
        toy_engine(k=2, block_size=1, num_blocks=21).generate([request])


@pytest.mark.fast
@pytest.mark.parametrize(
    ("error", "prompt", "sampling"),
    [
        (EmptyPrompt, [], {}),
        (PromptTooLong, [0] * 96, {"max_tokens": 1}),
        (PromptTooLong, [0] * 90, {"max_tokens": 7}),
        (InvalidRequest, [3, 24], {}),
        (InvalidRequest, [-1], {}),
        (InvalidSampling, [1], {"temperature": float("nan")}),
        (InvalidSampling, [1], {"max_tokens": 0}),
        (InvalidSampling, [1], {"stop_token_ids": (24,)}),
    ],
)
def test_what_can_never_be_served_is_refused_before_anything_runs(error, prompt, sampling):
    engine = toy_engine()
    good = request_of([1, 2], max_tokens=3)
    with pytest.raises(error):
        engine.generate([good, request_of(prompt, **({"max_tokens": 4} | sampling))])
    check(good, engine.generate([good])[0])  # its key is free, nothing is left over


@pytest.mark.fast
def test_streaming_yields_what_generate_returns_and_runs_interleave():
    engine = toy_engine()
    requests = [request_of([9, at], max_tokens=14, temperature=0.0, ignore_eos=True) for at in range(3)]
    streams = [engine.run(request) for request in requests]
    events = [[], [], []]
    while any(not seen or seen[-1].result is None for seen in events):
        for seen, stream in zip(events, streams, strict=True):
            if not seen or seen[-1].result is None:
                seen.append(next(stream))
    for request, seen, stream in zip(requests, events, streams, strict=True):
        streamed = tuple(token for event in seen for token in event.token_ids)
        assert streamed == seen[-1].result.token_ids
        check(request, seen[-1].result) if EOS not in streamed else None
        assert len(seen) > 2
        with pytest.raises(StopIteration):
            next(stream)


@pytest.mark.fast
@pytest.mark.long
def test_a_stream_that_is_dropped_frees_everything():
    engine = toy_engine(num_blocks=10)
    for _ in range(20):
        stream = engine.run(request_of([1, 2, 3], max_tokens=20, ignore_eos=True))
        next(stream)
        stream.close()
    check(request := request_of([2, 2], max_tokens=5), engine.generate([request])[0])


class SlowModel(ToyModel):
    """Takes a second of virtual time for every trunk pass."""

    def __init__(self, clock):
        super().__init__()
        self.clock = clock

    def trunk(self, token_ids_T, batch, pool, on_layer):
        self.clock.advance(1.0)
        return super().trunk(token_ids_T, batch, pool, on_layer)


@pytest.mark.fast
@pytest.mark.parametrize("scheduling", ["sync", "async"])
def test_deadlines_end_requests_wherever_they_are(scheduling):
    clock = VirtualClock()
    engine = toy_engine(SlowModel(clock), k=0, max_num_sequences=1, clock=clock, scheduling=scheduling)
    running = request_of([1, 2], k=0, max_tokens=50, deadline_s=10.0, ignore_eos=True)
    waiting = request_of([1, 2], k=0, max_tokens=2, deadline_s=5.0, ignore_eos=True)
    later = request_of([1, 2], k=0, max_tokens=4, deadline_s=50.0, ignore_eos=True)
    results = engine.generate([running, waiting, later])
    assert isinstance(results[0].error, RequestDeadlineExceeded)
    assert results[0].finish_reason is None
    assert 8 <= len(results[0].token_ids) <= 10
    assert isinstance(results[1].error, RequestDeadlineExceeded)
    assert results[1].token_ids == ()
    assert results[1].ttft_s is None
    assert results[2].finish_reason is FinishReason.LENGTH
    assert results[2].ttft_s > 10
    # The first token may be read while the next step runs already, which moves the clock.
    assert results[2].tpot_s == 1.0 if scheduling == "sync" else 2 / 3 <= results[2].tpot_s <= 1.0
    stream = engine.run(request_of([1, 2], k=0, max_tokens=50, deadline_s=clock.now_s() + 4, ignore_eos=True))
    seen = []
    with pytest.raises(RequestDeadlineExceeded):
        seen.extend(event for event in stream)
    assert engine.generate([request_of([3], max_tokens=1, k=0)])[0].finish_reason


class BreakingModel(ToyModel):
    def __init__(self):
        super().__init__()
        self.calls_left = 4

    def trunk(self, token_ids_T, batch, pool, on_layer):
        self.calls_left -= 1
        if self.calls_left == 0:
            raise RuntimeError("out of memory")
        return super().trunk(token_ids_T, batch, pool, on_layer)


@pytest.mark.fast
def test_a_failed_step_surfaces_and_the_engine_is_not_used_again():
    engine = toy_engine(BreakingModel())
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.generate([request_of([1, 2], max_tokens=9, ignore_eos=True) for _ in range(3)])
    with pytest.raises(AssertionError, match="earlier step failed"):
        engine.generate([request_of([1, 2], max_tokens=9)])
