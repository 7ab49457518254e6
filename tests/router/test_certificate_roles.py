"""Certificates that name roles: each service is for some of them, beside what every call proves."""

import asyncio

import grpc
import grpc.aio
import pytest

from baton.client import AsyncBatonClient
from baton.client.access import Access
from baton.core.config import KVTransferConfig
from baton.core.errors import PermissionDenied
from baton.kvtransfer.protocol.proof import connection_pass
from baton.kvtransfer.transports.over_grpc import GrpcTransport
from baton.kvtransfer.transports.over_grpc_stream import METHOD, NAME_KEY, PASS_KEY
from baton.proto import admin_pb2, admin_pb2_grpc, wire, worker_pb2, worker_pb2_grpc
from baton.proto.roles import ALLOWED, ROLES, roles_in
from baton.proto.secure_channel import SecureChannels
from baton.router.access.security import RouterSecurity
from baton.router.server import SERVICES
from baton.tests.inside import router_channel, worker_channel
from baton.tests.router.certificates import Authority
from baton.tests.router.fakes import cluster
from baton.worker.host import WorkerHost

pytestmark = [pytest.mark.asyncio, pytest.mark.fast]


@pytest.fixture(scope="module")
def inside(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("roles"))


@pytest.fixture(scope="module")
def holders(inside):
    """Files of a certificate for each role, and of one that names none."""
    made = {role: inside.files(role, roles=(role,)) for role in ROLES}
    return made | {"stranger": inside.files("stranger", roles=("auditor",)), "": inside.files("plain")}


async def code_of(call):
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return type(wire.error_from_rpc(error))
    return None


@pytest.mark.long
async def test_who_may_call_what_of_a_router(inside, holders):
    security = RouterSecurity(tls=inside.files("host", roles=("router", "prefill", "decode")), admin_port=0)
    async with cluster(security=security) as running:
        router = running.router
        state = running.of("prefill")[0].state()
        decode = running.of("decode")[0].state()
        for role, files in holders.items():
            channel = SecureChannels(files).open_aio(f"127.0.0.1:{router.admin_port}")
            admin = admin_pb2_grpc.AdminStub(channel).Status(admin_pb2.StatusRequest(), timeout=10.0)
            assert (await code_of(admin) is None) is (role in ("", "operator", "router")), role
            for report in (state, decode):
                proved = router_channel(channel, report.role, report.worker_id, router.callee)
                beat = worker_pb2_grpc.MembershipStub(proved).Heartbeat(report, timeout=10.0)
                found = await code_of(beat)
                assert found is (None if role in ("", report.role) else PermissionDenied), (role, report.role)
            await channel.close()
        refused = router.metrics.registry.get_sample_value(
            "baton_requests_refused_total", {"reason": "certificate_role"}
        )
        assert refused > 0


@pytest.mark.long
async def test_workers_and_operators_are_no_clients(inside, holders):
    security = RouterSecurity(tls=inside.files("host"), client_ca_file=str(inside.file), admin_port=0)
    async with cluster(security=security) as running:
        for role, files in holders.items():
            async with AsyncBatonClient(running.address, access=Access(tls=files)) as client:
                if role in ("prefill", "decode", "stranger"):
                    with pytest.raises(PermissionDenied):
                        await client.tokenize("hi")
                else:
                    await client.tokenize("hi")


@pytest.mark.long
async def test_a_worker_is_its_routers_alone(inside, holders):
    state = worker_pb2.WorkerState(worker_id="decode-0", role="decode", epoch=7)
    tls = inside.files("worker", roles=("decode",))
    host = WorkerHost("127.0.0.1", lambda server: None, lambda: state, "", pytest.fail, tls=tls)
    host.start()
    try:
        for role, files in holders.items():
            channel = SecureChannels(files).open_aio(host.address)
            admin = admin_pb2_grpc.AdminStub(worker_channel(channel, "decode", "decode-0", 7))
            found = await code_of(admin.Inventory(admin_pb2.InventoryRequest(), timeout=10.0))
            assert found is (None if role in ("", "router") else PermissionDenied), role
            await channel.close()
    finally:
        await asyncio.to_thread(host.close)


@pytest.mark.long
async def test_prefill_workers_alone_bring_kv(inside, holders):
    files = inside.files("incoming", roles=("decode",))
    about = {"tls_cert_file": files.cert_file, "tls_key_file": files.key_file, "tls_ca_file": files.ca_file}
    transport = GrpcTransport("grpc://127.0.0.1:0", KVTransferConfig(transport="grpc", **about))
    metadata = ((NAME_KEY, "somebody"), (PASS_KEY, connection_pass(bytes.fromhex(KVTransferConfig().key))))
    try:
        for role, own in holders.items():
            with SecureChannels(own).open(transport.address.removeprefix("grpc://")) as channel:
                call = channel.stream_stream(METHOD)(iter(()), timeout=10.0, metadata=metadata)
                code = None
                try:
                    await asyncio.to_thread(list, call)
                except grpc.RpcError as error:
                    code = error.code()
                is_refused = code is grpc.StatusCode.PERMISSION_DENIED
                assert is_refused is (role not in ("", "prefill")), (role, code)
    finally:
        transport.close()


async def test_every_service_of_a_router_is_somebodys():
    assert {SERVICES[name] for name in ("Inference", "Admin", "Membership")} <= set(ALLOWED)
    assert all(roles <= set(ROLES) for roles in ALLOWED.values())
    assert roles_in([b"baton://role/decode", b"localhost", b"https://role/router"]) == {"decode"}
