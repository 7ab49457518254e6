"""Whatever bytes reach any RPC of the router and of the workers, whoever sent them and whenever they go away: every end
is a typed status, no process dies, nothing is held, and a good request afterwards has its tokens.

BATON_FUZZ_GRPC_S is how long all of it goes on; `make test-all` says 15 minutes.
"""

import itertools

import grpc
import pytest
from google.protobuf.message import DecodeError
from hypothesis import strategies as st

from baton.core.config import KVTransferConfig
from baton.kvtransfer.protocol.messages import encode_control
from baton.kvtransfer.protocol.proof import connection_pass
from baton.kvtransfer.transports.over_grpc_stream import METHOD as EXCHANGE
from baton.kvtransfer.transports.over_grpc_stream import NAME_KEY, PASS_KEY, encode_control_packet
from baton.proto import inference_pb2, kv_pb2, wire, worker_pb2
from baton.tests.e2e.fuzz_fleet import FuzzFleet, duration_s, rounds
from baton.tests.e2e.proto_fuzz import damaged, payloads
from baton.tests.e2e.rpc_fuzz import BROKEN, QUIET, ROUTER, SAMPLING, SEEN, calls, pairs, run_round, send_all
from baton.tests.worker.streams import ATTEND_ALL, RUN_ALL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600), QUIET]
SECONDS = duration_s("GRPC", 25.0) / 5


@pytest.fixture(scope="module", params=["grpc", "auto"])
def fleet(request):
    running = FuzzFleet(transfer=KVTransferConfig(transport=request.param, lease_s=2.0))
    running.is_grpc = request.param == "grpc"
    yield running
    running.close()
    for (method, code), num in sorted(SEEN.items()):
        print(f"{method.removeprefix('/baton.v1.')}: {num} {code}")


def test_every_rpc_of_the_router(fleet):
    known = (fleet.prefill.epoch ^ 1, fleet.decode.epoch ^ 1)
    with grpc.insecure_channel(fleet.address) as channel:

        def send(drawn, disconnects):
            send_all({"router": fleet.address}, drawn, disconnects)
            if any(method.endswith(("/Drain", "/SetAdmission")) for _, method, *_ in drawn):
                fleet.restore(channel)  # else little of what follows would come to a worker

        for number in rounds(SECONDS, "router"):
            run_round(number, calls("router", ROUTER, known), send)
            fleet.restore(channel)
            fleet.check()


def test_every_rpc_of_the_workers(fleet):
    """Somebody with a certificate, or a router of another build: at the workers' own ports."""
    sampling = wire.sampling_to_proto(wire.sampling_from_proto(inference_pb2.Sampling(**SAMPLING)))
    decode = fleet.decode.about()
    common = {
        "attempt": {"request_id": "fuzz", "attempt": 1},
        "prompt_token_ids": list(range(300, 340)),
        "sampling": sampling,
        "num_draft_tokens": 2,
        "timeout_ms": 2000,
    }
    peer = {key: decode[key] for key in ("worker_id", "kv_address", "epoch")}
    admin = {
        method: given for method, given in ROUTER.items() if method.endswith(("Inventory", "SetSpeculation", "Restart"))
    }
    prefill = admin | {
        RUN_ALL: (worker_pb2.PrefillRequest, worker_pb2.PrefillRequest(decode=peer, **common)),
        "/baton.v1.Prefill/WatchPrefixes": (
            worker_pb2.WatchPrefixesRequest,
            worker_pb2.WatchPrefixesRequest(epoch=fleet.prefill.epoch),
        ),
    }
    attend = {ATTEND_ALL: (worker_pb2.AttendRequest, worker_pb2.AttendRequest(**common))}
    watch = worker_pb2.WatchPrefixesRequest(epoch=fleet.decode.epoch)
    decode_only = admin | attend | {"/baton.v1.Decode/WatchPrefixes": (worker_pb2.WatchPrefixesRequest, watch)}
    known = (decode["worker_id"], decode["kv_address"], "fuzz", fleet.prefill.epoch ^ 1, fleet.decode.epoch ^ 1)
    addresses = {"prefill": fleet.prefill.host.address, "decode": fleet.decode.host.address}
    kinds = [calls("prefill", prefill, known), calls("decode", decode_only, known)]
    both = pairs(prefill, attend, known)
    with grpc.insecure_channel(fleet.address) as channel:
        for number in rounds(SECONDS, "workers"):
            run_round(number, st.one_of(kinds), lambda drawn, leaves: send_all(addresses, drawn, leaves))
            run_round(number, both, lambda drawn, leaves: send_all(addresses, list(itertools.chain(*drawn)), leaves))
            fleet.restore(channel)
            fleet.check()


@st.composite
def packets(draw, known):
    """Of a stream of the hand-off: Controls with a right checksum, or whatever."""
    control = draw(payloads(kv_pb2.Control.DESCRIPTOR, None, known))
    match draw(st.integers(0, 5)):
        case 0:
            return draw(payloads(kv_pb2.Packet.DESCRIPTOR))
        case 1:
            return draw(damaged(encode_control_packet(encode_control(kv_pb2.Control(hello=kv_pb2.Hello())))))
        case _:
            try:
                parsed = kv_pb2.Control.FromString(control)
            except DecodeError:
                return encode_control_packet(control)
            parsed.ClearField("checksum")
            return encode_control_packet(encode_control(parsed))


def exchange(address, streams, disconnects):
    with grpc.insecure_channel(address, (("grpc.use_local_subchannel_pool", 1),)) as channel:
        for at, sent in enumerate(streams):
            shown = (PASS_KEY, connection_pass(bytes.fromhex(KVTransferConfig().key)))
            metadata = (shown, (NAME_KEY, f"fuzz-{at}"), ("baton-stream", "bulk" if at % 2 else "control"))
            stream = channel.stream_stream(EXCHANGE)(iter(sent), timeout=1.0, metadata=metadata)
            if disconnects:
                stream.cancel()
                continue
            try:
                for _ in stream:
                    SEEN[EXCHANGE, "answer"] += 1
                SEEN[EXCHANGE, "OK"] += 1
            except grpc.RpcError as error:
                SEEN[EXCHANGE, error.code().name] += 1
                assert error.code() not in BROKEN, (sent, error.code(), error.details())


def test_the_hand_off(fleet):
    """Controls that no prefill worker sends, at the port where KV lands."""
    if not fleet.is_grpc:
        pytest.skip("tests/kvtransfer does this over sockets")
    about = fleet.decode.about()
    state = fleet.decode.state()
    known = (about["epoch"], state.kv_epoch or about["epoch"], fleet.prefill.epoch, "fuzz")
    address = about["kv_address"].removeprefix("grpc://")
    with grpc.insecure_channel(fleet.address) as channel:
        for number in rounds(SECONDS, "hand-off"):
            streams = st.lists(packets(known), max_size=8)
            run_round(number, streams, lambda drawn, leaves: exchange(address, drawn, leaves))
            fleet.restore(channel)
            fleet.check()
