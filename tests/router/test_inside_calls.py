"""Calls inside a deployment: at every service of every port, what proves nothing is refused unread.

The lists come from the `.proto` files and from what a server has, so a service that is added is closed, or fails here.
"""

import asyncio
import time

import grpc
import grpc.aio
import pytest

from baton.core.errors import PermissionDenied, Unauthenticated
from baton.core.inside import ROUTER, Caller, DeploymentSecret, WorkerIdentity, incarnation_name, worker_name
from baton.proto import admin_pb2, inference_pb2, kv_pb2, wire, worker_pb2, worker_pb2_grpc
from baton.proto.inside import HEADER, InsideChannel
from baton.router.access.security import RouterSecurity
from baton.router.server import SERVICES
from baton.tests.inside import router_channel, worker_channel
from baton.tests.router.fakes import MODEL, cluster
from baton.worker.host import WorkerHost

pytestmark = [pytest.mark.asyncio, pytest.mark.fast]

OUTSIDE = {SERVICES["Inference"], SERVICES["Admin"]}  # for clients and operators, who have keys
METHODS = [
    (service.full_name, method.name)
    for file in (inference_pb2, admin_pb2, worker_pb2, kv_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
] + [("baton.v1.Added", "Later")]
STREAMS = {"baton.v1.Added", "baton.v1.KvTransfer"}
OTHER = DeploymentSecret(b"another one, not this deployment"[:32])
UNREADABLE = b"\xff\xff\xff"


class Everything:
    """A server's handlers for all of METHODS, which must never be reached."""

    def __init__(self, but=()):
        self.reached = []
        self.handlers = []
        for service in sorted({service for service, _ in METHODS} - set(but)):
            names = [name for owner, name in METHODS if owner == service]
            make = grpc.stream_stream_rpc_method_handler if service in STREAMS else grpc.unary_unary_rpc_method_handler
            methods = {name: make(self._reach, lambda data: self._read(data)) for name in names}
            self.handlers.append(grpc.method_handlers_generic_handler(service, methods))

    def _read(self, data):
        self.reached.append(data)

    async def _reach(self, request, context):
        self.reached.append(request)


async def outcome(channel, service, method, metadata=()):
    """The typed error that a call ends with."""
    path, options = f"/{service}/{method}", {"timeout": 10.0, "metadata": metadata}
    try:
        if service not in STREAMS:
            await channel.unary_unary(path)(UNREADABLE, **options)
            return None, None
        call = channel.stream_stream(path)(**options)
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return wire.error_from_rpc(error), error.code()
    return None, None


def worker_proofs(epoch=7):
    """Headers that are no good at a worker."""
    name = worker_name("decode", "decode-0")
    key, callee = DeploymentSecret.of_process().worker_key(name), incarnation_name(name, epoch)
    now_s = time.time()
    for service, method in METHODS:
        path = f"/{service}/{method}"
        good = Caller(ROUTER, key)
        yield service, method, None
        yield service, method, "1 router x"
        yield service, method, Caller(ROUTER, OTHER.worker_key(name)).prove(path, callee, now_s, "a")
        yield service, method, Caller(name, key).prove(path, callee, now_s, "b")  # of itself
        yield service, method, good.prove(path, incarnation_name(name, epoch + 1), now_s, "c")
        yield service, method, good.prove("/baton.v1.Other/Method", callee, now_s, "d")
        yield service, method, good.prove(path, callee, now_s - 3600, "e")


@pytest.mark.long
async def test_nothing_of_a_worker_is_reached_without_the_secret(caplog):
    everything = Everything(but=[SERVICES["Admin"]])
    ended = []

    def register(server):
        server.add_generic_rpc_handlers(tuple(everything.handlers))

    state = worker_pb2.WorkerState(worker_id="decode-0", role="decode", epoch=7)
    host = WorkerHost("127.0.0.1", register, lambda: state, "", ended.append)
    host.start()
    try:
        async with grpc.aio.insecure_channel(host.address) as channel:
            for service, method, header in worker_proofs():
                metadata = () if header is None else ((HEADER, header),)
                error, code = await outcome(channel, service, method, metadata)
                if code is grpc.StatusCode.UNIMPLEMENTED and service == SERVICES["Admin"]:
                    continue  # the worker has no such method
                assert (type(error), code) == (Unauthenticated, grpc.StatusCode.UNAUTHENTICATED), (service, header)
            assert everything.reached == [] and ended == []
            assert DeploymentSecret.of_process().text not in caplog.text
            assert caplog.text.count("refused (proof_missing)") == 1
            inside = worker_channel(channel, "decode", "decode-0", 7)
            await outcome(inside, "baton.v1.Added", "Later")
            assert everything.reached, "the test reaches what there is"
    finally:
        host.close()


@pytest.mark.parametrize("admin_port", [None, 0])
async def test_nothing_inside_of_a_router_is_reached_without_the_secret(admin_port):
    async with cluster(security=RouterSecurity(admin_port=admin_port)) as running:
        router, everything = running.router, Everything(but=OUTSIDE | {SERVICES["Membership"]})
        for listener in router._listeners:
            listener.server.add_generic_rpc_handlers(tuple(everything.handlers))
        before = [member.heartbeat_s for member in router.members.all()]
        for port in {router.port, router.admin_port}:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                for service, method in METHODS:
                    if service in OUTSIDE:
                        continue
                    error, code = await outcome(channel, service, method)
                    if code is grpc.StatusCode.UNIMPLEMENTED:
                        assert service == SERVICES["Membership"] and port != router.admin_port
                        continue
                    assert type(error) is Unauthenticated, (service, method, code)
                name = worker_name("prefill", "prefill-0")
                for secret, callee in ((OTHER, router.callee), (DeploymentSecret.of_process(), "router@" + "0" * 16)):
                    wrong = InsideChannel(channel, Caller(name, secret.worker_key(name)), lambda callee=callee: callee)
                    assert type((await outcome(wrong, "baton.v1.Added", "Later"))[0]) is Unauthenticated
                good = router_channel(channel, "prefill", "prefill-0", router.callee)
                everything.reached.clear()
                await outcome(good, "baton.v1.Added", "Later")
                assert everything.reached, "the test reaches what there is"
        assert len(router.members.all()) == len(before)
        refused = router.metrics.registry.get_sample_value("baton_requests_refused_total", {"reason": "proof_missing"})
        assert refused and refused >= len(METHODS) - 20


async def test_a_worker_reports_for_itself_alone():
    async with cluster() as running:
        prefill, decode = running.of("prefill")[0].state(), running.of("decode")[0].state()
        impostor = worker_pb2.WorkerState()
        impostor.CopyFrom(prefill)
        impostor.epoch, impostor.address = 99, "127.0.0.1:9"
        renamed = worker_pb2.WorkerState()
        renamed.CopyFrom(impostor)
        renamed.worker_id = "decode-0"  # its own name, in the other role
        for state in (impostor, renamed):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await running.report(state, by=decode)
            assert type(wire.error_from_rpc(refused.value)) is PermissionDenied
        assert {member.state.epoch for member in running.router.members.all()} == {prefill.epoch, decode.epoch}
        registry = running.router.metrics.registry
        assert registry.get_sample_value("baton_requests_refused_total", {"reason": "worker_name"}) == 2


async def test_a_heartbeat_is_taken_once():
    async with cluster() as running:
        state = running.of("prefill")[0].state()
        name, path = worker_name(state.role, state.worker_id), "/baton.v1.Membership/Heartbeat"
        caller = Caller(name, DeploymentSecret.of_process().worker_key(name))
        header = caller.prove(path, running.router.callee, time.time(), "once")
        call = worker_pb2_grpc.MembershipStub(running.channel).Heartbeat
        await call(state, metadata=((HEADER, header),))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call(state, metadata=((HEADER, header),))
        assert wire.error_from_rpc(refused.value).fields["reason"] == "replayed"


async def test_a_worker_finds_the_next_life_of_its_router():
    def state():
        return worker_pb2.WorkerState(
            worker_id="prefill-7",
            role="prefill",
            epoch=5,
            address="127.0.0.1:9",
            model=MODEL,
            max_model_len=200,
            block_size=16,
            inventory=worker_pb2.Inventory(num_blocks=10, num_blocks_free=10),
        )

    async def known(running):
        async with asyncio.timeout(30):
            while "prefill-7" not in [member.state.worker_id for member in running.router.members.all()]:
                await asyncio.sleep(0.01)

    host = None
    try:
        async with cluster(num_prefill=0, num_decode=0) as first:
            port, callee = first.router.port, first.router.callee
            identity = WorkerIdentity(role="prefill", worker_id="prefill-7", epoch=5)
            host = WorkerHost("127.0.0.1", lambda server: None, state, first.address, pytest.fail, identity=identity)
            host.start()
            await known(first)
        async with cluster(num_prefill=0, num_decode=0, port=port) as second:
            assert second.router.callee != callee
            await known(second)
    finally:
        if host is not None:
            await asyncio.to_thread(host.close)
