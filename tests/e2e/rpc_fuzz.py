"""RPCs of drawn bytes: what is sent to which method, when whoever sent it leaves, and which ends are good ones."""

import collections
import contextlib
import itertools
import queue

import grpc
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from baton.core.errors import BatonError
from baton.proto import admin_pb2, inference_pb2, wire, worker_pb2
from baton.tests.e2e.proto_fuzz import nearly, payloads
from baton.tests.inside import met
from baton.tests.worker.streams import ATTEND_ALL, RUN_ALL, ends_in, opening

# The router and the workers in this process draw numbers at random, too, while Hypothesis watches who does.
QUIET = pytest.mark.filterwarnings(
    "ignore:Do not use the `random` module:hypothesis.errors.HypothesisDeprecationWarning"
)
NUM_EXAMPLES = 40  # in a round
IDS = (f"fuzz-{number}" for number in itertools.count())
SEEN: collections.Counter[tuple[str, str]] = collections.Counter()  # ends, by method and status
SAMPLING = {
    "max_tokens": 12,
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "seed": 1,
    "n": 1,
    "repetition_penalty": 1.0,
}
GENERATE = inference_pb2.GenerateRequest(text="import os\n\n\ndef f(", sampling=SAMPLING)
ROUTER = {
    "/baton.v1.Inference/Generate": (inference_pb2.GenerateRequest, GENERATE),
    "/baton.v1.Inference/Tokenize": (inference_pb2.TokenizeRequest, inference_pb2.TokenizeRequest(text="def f(")),
    "/baton.v1.Inference/GetModel": (inference_pb2.GetModelRequest, None),
    "/baton.v1.Admin/Status": (admin_pb2.StatusRequest, None),
    "/baton.v1.Admin/Inventory": (admin_pb2.InventoryRequest, None),
    "/baton.v1.Admin/SetSpeculation": (admin_pb2.SetSpeculationRequest, None),
    "/baton.v1.Admin/Drain": (admin_pb2.DrainRequest, admin_pb2.DrainRequest(worker_id="decode-0", grace_ms=10)),
    "/baton.v1.Admin/ClearQuarantine": (admin_pb2.ClearQuarantineRequest, None),
    "/baton.v1.Admin/Restart": (admin_pb2.RestartRequest, admin_pb2.RestartRequest(worker_id="decode-0", epoch=7)),
    "/baton.v1.Admin/SetAdmission": (admin_pb2.SetAdmissionRequest, admin_pb2.SetAdmissionRequest(max_queue_len=3)),
    "/baton.v1.Admin/Scale": (admin_pb2.ScaleRequest, admin_pb2.ScaleRequest(num_prefill=1, num_decode=1)),
}
BUSY = ("/Generate", "/RunAll", "/AttendAll")
WAITING = ("/RunAll", "/WatchPrefixes", "/AttendAll")  # what nobody follows up
BOTH_WAYS = {RUN_ALL: worker_pb2.PrefillCommands, ATTEND_ALL: worker_pb2.DecodeCommands}  # of which one is sent
# Beside an error of ours: of gRPC itself, or of the one who asked.
UNTYPED = (grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED)
BROKEN = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.DATA_LOSS)


class Call:
    """One RPC of plain bytes: begun, perhaps left in the middle, and ended."""

    def __init__(self, channel, method, data, timeout_s, leave_after):
        self.method, self.data, self.leave_after = method, data, leave_after
        self.said = queue.SimpleQueue()
        if method in BOTH_WAYS:
            self.said.put(data)
            self.stream = channel.stream_stream(method)(iter(self.said.get, None), timeout=timeout_s)
        else:  # one answer is a stream of one
            self.stream = channel.unary_stream(method)(data, timeout=timeout_s)

    def end(self):
        """Read what comes; every end is good that has a type."""
        try:
            if self.leave_after == 0:
                self.stream.cancel()
            for at, frame in enumerate(self.stream, 1):
                if self.method in BOTH_WAYS:
                    self._check_ends(frame)
                if at == self.leave_after:
                    self.stream.cancel()
            SEEN[self.method, "OK"] += 1
        except grpc.RpcError as error:
            check_status(error, self.method, self.data)
        finally:
            self.said.put(None)

    def _check_ends(self, frame):
        for error in ends_in(self.method, frame):
            SEEN[self.method, "end" if error is None else type(error).grpc_code] += 1
            self.said.put(None)  # the call ends with its stream
            shown = (self.method, self.data[:300], error)
            assert error is None or (isinstance(error, BatonError) and error.message), shown
            assert error is None or type(error).grpc_code not in {code.name for code in BROKEN}, shown


def check_status(error, method, data):
    SEEN[method, error.code().name] += 1
    shown = (method, data[:300], error.code(), error.details())
    assert error.code() not in BROKEN, shown
    if error.code() in UNTYPED:
        return
    assert wire.ERROR_KEY in [key for key, _ in error.trailing_metadata() or ()], shown
    typed = wire.error_from_rpc(error)
    assert isinstance(typed, BatonError) and typed.message, shown
    assert type(typed).grpc_code == error.code().name, shown


@st.composite
def calls(draw, side, methods, known=()):
    """What to send to one of a side's methods, and when to leave. Half of it goes where the work is done."""
    busy = [method for method in methods if method.endswith(BUSY)]
    method = draw(st.sampled_from(busy if busy and draw(st.booleans()) else sorted(methods)))
    kind, good = methods[method]
    if good is not None and "attempt" in kind.DESCRIPTOR.fields_by_name and draw(st.integers(0, 3)):
        good.attempt.request_id = next(IDS)  # else one that somebody has already
    data = draw(payloads(kind.DESCRIPTOR, good, known))
    if method in BOTH_WAYS:
        data = opening(data) if draw(st.integers(0, 9)) else draw(payloads(BOTH_WAYS[method].DESCRIPTOR, None, known))
    return side, method, data, *draw(fates(method))


@st.composite
def fates(draw, method):
    """(seconds, messages after which the caller leaves)."""
    seconds = [0.001, 0.05, 0.3, 0.6, 0.6] if method.endswith(WAITING) else [0.001, 0.05, 0.5, 3.0, 3.0, 3.0]
    return draw(st.sampled_from(seconds)), draw(st.sampled_from([None, None, None, 0, 1, 2, 5]))


@st.composite
def pairs(draw, prefill, decode, known):
    """Both legs of one attempt, as a router opens them, each nearly good."""
    request_id, made = next(IDS), []
    for side, methods in (("decode", decode), ("prefill", prefill)):
        method = next(method for method in methods if method.endswith(("/AttendAll", "/RunAll")))
        good = methods[method][1]
        good.attempt.request_id = request_id
        message = draw(nearly(good, known)) if draw(st.integers(0, 2)) else good
        made.append((side, method, opening(message.SerializeToString()), *draw(fates("pair"))))
    return made


def run_round(number, strategy, send):
    """One round of examples, side by side as they are drawn."""

    @seed(number)
    @settings(
        max_examples=NUM_EXAMPLES,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(strategy, min_size=1, max_size=6), st.booleans())
    def each(drawn, disconnects):
        send(drawn, disconnects)

    each()


def send_all(addresses, drawn, disconnects):
    """All calls over one connection to each side, which may be closed under them."""
    options = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", 64 << 20))
    with contextlib.ExitStack() as stack:
        channels = {
            side: stack.enter_context(grpc.insecure_channel(address, options)) for side, address in addresses.items()
        }
        # Workers look at messages of their router alone.
        channels = {side: channel if side == "router" else met(channel) for side, channel in channels.items()}
        begun = [Call(channels[side], *one) for side, *one in drawn]
        if disconnects:
            begun[0].end()
            return
        for call in begun:
            call.end()
