"""An attempt that has ended forwards nothing, whatever its workers still say."""

from types import SimpleNamespace

import pytest

from baton.core.errors import InternalError, ProtocolError, RequestCancelled
from baton.core.requests.request import AttemptKey, GenerationRequest
from baton.core.requests.sampling import SamplingParams
from baton.proto import worker_pb2
from baton.proto.stream_mux_wire import StreamTokens
from baton.router.attempt.request_run import RequestRun
from baton.tests.router.gate_simulation import Clock

pytestmark = pytest.mark.fast
FIRST = worker_pb2.PrefillEvent(first_token=worker_pb2.FirstToken(token=7))


def a_run(channels=None, max_tokens=8):
    def member(worker_id):
        state = SimpleNamespace(worker_id=worker_id, kv_address="", kv_epoch=0)
        return SimpleNamespace(state=state, incarnation=SimpleNamespace(worker_id=worker_id, epoch=5))

    request = GenerationRequest(
        key=AttemptKey("r", 1),
        prompt_token_ids=(1, 2),
        sampling=SamplingParams(max_tokens=max_tokens),
        deadline_s=10.0,
        num_draft_tokens=0,
    )
    pair = SimpleNamespace(prefill=member("p"), decode=member("d"))
    return RequestRun(request, pair, channels=channels, clock=Clock())


def say_all(run):
    run._on_prefill_event(worker_pb2.PrefillEvent(first_token=worker_pb2.FirstToken(token=9)))
    run._on_decode_event(StreamTokens(1, [8]))
    run._on_decode_event(worker_pb2.DecodeEvent(tokens=worker_pb2.DecodeTokens(index=1, token_ids=[8])))


def test_what_is_said_in_time_is_forwarded():
    run = a_run()
    run._on_prefill_event(FIRST)
    run._on_decode_event(StreamTokens(1, [8]))
    run.close()
    assert run.take().token_ids == [7, 8]
    with pytest.raises(RequestCancelled):
        run.take()


@pytest.mark.parametrize("has_first", [False, True])
def test_what_is_said_after_the_end_is_not(has_first):
    run, arrived = a_run(), []
    if has_first:
        run._on_prefill_event(FIRST)
        run.take()
    run.on_arrival = lambda num, is_last: arrived.append(num)
    run.close()
    say_all(run)
    with pytest.raises(RequestCancelled):
        run.take()
    assert arrived == []


@pytest.mark.parametrize("raised", [ZeroDivisionError(), ProtocolError("odd")])
def test_what_is_raised_by_early_tokens_ends_the_attempt(raised, monkeypatch):
    """They wait for the first token; by then the stream on which that comes may not be needed any more."""
    run, wake, calls = a_run(), RequestRun._wake, []

    def broken(self):
        calls.append(None)
        if len(calls) == 2:  # the first token has been said, the early ones are known
            raise raised
        wake(self)

    monkeypatch.setattr(RequestRun, "_wake", broken)
    run._on_decode_event(StreamTokens(1, [8, 9]))
    run._on_prefill_event(FIRST)
    assert run.take() is not None
    with pytest.raises(ProtocolError if isinstance(raised, ProtocolError) else InternalError):
        run.take()
