"""A worker's port and its heartbeats under certificates: who gets in, who is told, and what follows a change."""

import asyncio
import time

import grpc
import pytest

from baton.core import handshakes
from baton.core.errors import ConfigInvalid
from baton.core.tls_files import TlsFiles
from baton.proto import admin_pb2, admin_pb2_grpc, worker_pb2
from baton.proto.secure_channel import SecureChannels
from baton.router.access.security import RouterSecurity
from baton.tests.inside import worker_channel
from baton.tests.router.certificates import Authority, replace
from baton.tests.router.fakes import MODEL, cluster
from baton.worker import host as host_module
from baton.worker.host import WorkerHost

pytestmark = pytest.mark.fast


def make_host(tls, router_address="", worker_id="prefill-9"):
    def state():
        return worker_pb2.WorkerState(
            worker_id=worker_id,
            role="prefill",
            epoch=7,
            address=host.address,
            model=MODEL,
            max_model_len=200,
            block_size=16,
            inventory=worker_pb2.Inventory(num_blocks=10, num_blocks_free=10),
        )

    host = WorkerHost("127.0.0.1", lambda server: None, state, router_address, pytest.fail, tls=tls)
    host.start()
    return host


def ask(host, files):
    with SecureChannels(files).open(host.address) as channel:
        call = admin_pb2_grpc.AdminStub(worker_channel(channel, "prefill", "prefill-9", 7)).Inventory
        return call(admin_pb2.InventoryRequest(), timeout=5.0).workers[0].state.worker_id


def test_only_the_deployments_own_get_in(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(handshakes, "GRACE_S", 0.1)
    monkeypatch.setattr(host_module, "HANDSHAKES_S", 0.05)
    inside, outside = Authority(tmp_path / "inside"), Authority(tmp_path / "outside")
    host = make_host(inside.files("worker"))
    try:
        assert ask(host, inside.files("router")) == "prefill-9"
        wrong = (
            TlsFiles(),
            TlsFiles(ca_file=str(inside.file)),
            outside.files("stranger", ca=inside),
            inside.files("old", days=-1),
        )
        for files in wrong:
            with pytest.raises(grpc.RpcError) as caught:
                ask(host, files)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        end_s = time.monotonic() + 5
        while "connections to the worker's port came to no call" not in caplog.text:
            assert time.monotonic() < end_s
            time.sleep(0.02)
        assert ask(host, inside.files("router")) == "prefill-9"
    finally:
        host.close()


def test_a_host_without_a_usable_certificate_does_not_start(tmp_path):
    for files in (TlsFiles(ca_file=str(Authority(tmp_path).file)), TlsFiles(cert_file="no", key_file="no")):
        with pytest.raises(ConfigInvalid, match="tls_"):
            make_host(files)


@pytest.mark.long
@pytest.mark.asyncio
async def test_heartbeats_need_a_certificate_and_follow_a_new_one(tmp_path, caplog):
    inside, outside = Authority(tmp_path / "inside"), Authority(tmp_path / "outside")
    security = RouterSecurity(tls=inside.files("router"), admin_port=0)
    async with cluster(0, 0, security=security) as running:
        address = f"127.0.0.1:{running.router.admin_port}"

        async def becomes(*worker_ids):
            async with asyncio.timeout(5.0):
                while {member.state.worker_id for member in running.router.members.all() if member.alive} != {
                    *worker_ids
                }:
                    await asyncio.sleep(0.02)

        stranger = await asyncio.to_thread(make_host, outside.files("stranger", ca=inside), address, "stranger")
        host = await asyncio.to_thread(make_host, inside.files("worker"), address)
        try:
            await becomes("prefill-9")
            async with asyncio.timeout(30.0):
                while "or does not accept this worker's certificate" not in caplog.text:
                    await asyncio.sleep(0.02)
            # The stranger is given a certificate of the authority: it comes in without a restart.
            inside.folder, mine = outside.folder, inside.folder
            inside.issue("stranger")
            await becomes("prefill-9", "stranger")
            # The router's authority changes, and the worker's files after it.
            inside.folder = mine
            both = inside.ca.cert_pem.bytes() + outside.ca.cert_pem.bytes()
            replace(inside.file, both)
            inside.ca = outside.ca
            inside.issue("router")
            inside.issue("worker")
            await asyncio.sleep(1.0)
            await becomes("prefill-9", "stranger")
            files = inside.files("operator")
            assert await asyncio.to_thread(ask, host, files) == "prefill-9"
        finally:
            await asyncio.to_thread(stranger.close)
            await asyncio.to_thread(host.close)
