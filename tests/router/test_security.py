"""A router with certificates, keys, two ports and limits: who gets in, who does not, and what changes while it runs."""

import asyncio
import logging
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.client import Access, AsyncBatonClient
from baton.core import handshakes
from baton.core.errors import (
    BatonError,
    ConfigInvalid,
    InvalidRequest,
    Overloaded,
    PermissionDenied,
    PromptTooLong,
    Unauthenticated,
    WorkerLost,
)
from baton.core.requests.sampling import SamplingParams
from baton.core.tls_files import TlsFiles, TlsWatch
from baton.proto import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc, wire, worker_pb2_grpc
from baton.proto.secure_channel import SecureChannels
from baton.router.access import listener
from baton.router.access.api_keys import KeyEntry, digest_of, new_key
from baton.router.access.security import ClientLimits, RouterSecurity
from baton.tests.router.certificates import Authority, replace
from baton.tests.router.fakes import cluster

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, seed=1)


class Keys:
    """A file of keys."""

    def __init__(self, path):
        self.path = path
        self.entries = {}
        self.write()

    def add(self, name, tenant, expires=None, **quota):
        key = new_key()
        entry = KeyEntry(name=name, tenant=tenant, sha256=digest_of(key), expires=expires, **quota)
        self.entries[name] = entry
        self.write()
        return key

    def write(self):
        self.path.write_text("".join(entry.to_line() + "\n" for entry in self.entries.values()))


@pytest.fixture
def inside(tmp_path):
    """The deployment's own authority."""
    return Authority(tmp_path / "inside")


@pytest.fixture
def keys(tmp_path):
    return Keys(tmp_path / "keys.jsonl")


def to_public(running, inside, key="", files=None):
    tls = files or TlsFiles(ca_file=str(inside.file))
    return AsyncBatonClient(running.address, timeout_s=5.0, access=Access(tls=tls, api_key=key))


@asynccontextmanager
async def secured(inside, keys=None, **more):
    tls = inside.files("router")
    limits = more.pop("limits", ClientLimits())
    path = "" if keys is None else str(keys.path)
    security = RouterSecurity(tls=tls, api_keys_file=path, admin_port=0, limits=limits, **more)
    async with cluster(security=security) as running:
        yield running


@pytest.mark.fast
@pytest.mark.asyncio
async def test_a_key_over_tls_gets_an_answer_of_its_own_tenant(inside, keys):
    key = keys.add("ada", "acme")
    async with secured(inside, keys) as running, to_public(running, inside, key) as client:
        assert await client.generate_text("hello", sampling=GREEDY)
        assert [seen.request.tenant for seen in running.workers[0].seen] == ["acme"]
        assert await client.tokenize("hi")
        async with AsyncBatonClient(
            f"127.0.0.1:{running.router.admin_port}", access=Access(tls=inside.files("operator"))
        ) as operator:
            assert (await operator.status()).workers


def refused(running, reason):
    found = running.router.metrics.registry.get_sample_value("baton_requests_refused_total", {"reason": reason})
    return int(found or 0)


@pytest.mark.asyncio
async def test_who_has_no_good_key_is_refused_unread_and_counted(inside, keys, caplog):
    keys.add("old", "acme", expires="2020-01-01T00:00:00+00:00")
    expired = new_key()
    keys.entries["late"] = KeyEntry(
        name="late", tenant="a", sha256=digest_of(expired), expires="2020-01-01T00:00+00:00"
    )
    gone = keys.add("gone", "acme")
    async with secured(inside, keys) as running:
        keys.entries.pop("gone")
        keys.write()
        await asyncio.sleep(0.6)
        for key, reason in (("", "missing"), (new_key(), "unknown"), (gone, "unknown"), (expired, "expired")):
            before = refused(running, f"key_{reason}")
            async with to_public(running, inside, key) as client:
                with pytest.raises(Unauthenticated) as error:
                    await client.generate_text("x" * 100, sampling=GREEDY)
                assert error.value.fields["reason"] == reason
                with pytest.raises(Unauthenticated):
                    await client.tokenize("hi")
                with pytest.raises(Unauthenticated):
                    await client.model()
            assert refused(running, f"key_{reason}") == before + 3
            assert not key or key not in caplog.text
        async with SecureChannels(TlsFiles(ca_file=str(inside.file))).open_aio(running.address) as channel:
            for header in ("Basic abc", "Bearer", "Bearer ", "bearer " + "x" * 5000, gone):
                with pytest.raises(grpc.aio.AioRpcError) as found:
                    await inference_pb2_grpc.InferenceStub(channel).GetModel(
                        inference_pb2.GetModelRequest(), metadata=(("authorization", header),)
                    )
                assert found.value.code() is grpc.StatusCode.UNAUTHENTICATED
            good = keys.add("good", "acme")
            await asyncio.sleep(0.6)
            header = ("authorization", f"Bearer {good}")
            for metadata in ((header,), (header, header), (header, ("authorization", f"Bearer {gone}"))):
                call = inference_pb2_grpc.InferenceStub(channel).GetModel(
                    inference_pb2.GetModelRequest(), metadata=metadata
                )
                is_let_in = await call.code() is not grpc.StatusCode.UNAUTHENTICATED
                assert is_let_in == (len(metadata) == 1), "of several nobody can tell which is meant"
            health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert health.status == health_pb2.HealthCheckResponse.SERVING
        assert not running.workers[0].seen
    assert "refused (key_unknown)" in caplog.text


@pytest.mark.asyncio
async def test_a_key_is_made_and_revoked_while_the_router_runs(inside, keys, caplog):
    async with secured(inside, keys) as running:
        key = keys.add("new", "acme")
        await asyncio.sleep(0.6)
        async with to_public(running, inside, key) as client:
            assert await client.tokenize("hi")
            keys.path.write_text("{broken")
            await asyncio.sleep(0.6)
            assert await client.tokenize("hi")  # nobody loses access by a slip
            assert "stay in force" in caplog.text
            keys.entries.clear()
            keys.write()
            await asyncio.sleep(0.6)
            with pytest.raises(Unauthenticated):
                await client.tokenize("hi")
        sample = running.router.metrics.registry.get_sample_value
        reloads = [
            sample("baton_security_reloads_total", {"what": "api_keys", "outcome": outcome})
            for outcome in ("taken", "refused")
        ]
        assert reloads == [2, 1]


@pytest.mark.asyncio
async def test_tenants_are_the_keys_and_never_meet(inside, keys):
    ada, bob = keys.add("ada", "acme"), keys.add("bob", "bolts")
    async with secured(inside, keys) as running:
        running.script.token_delay_s = 0.03
        async with to_public(running, inside, ada) as first, to_public(running, inside, bob) as second:
            for tenant in ("bolts", "ACME", "other"):
                with pytest.raises(PermissionDenied):
                    await first.generate_text("hi", sampling=GREEDY, tenant=tenant)
            assert refused(running, "tenant") == 3
            assert await first.generate_text("hi", sampling=GREEDY, tenant="acme")
            # The same id, at the same time: whoever cancels ends its own request and no other.
            request = inference_pb2.GenerateRequest(text="hi", request_id="same", sampling=wire_sampling())
            mine = first._inference.Generate(request, metadata=first._metadata)
            theirs = second._inference.Generate(request, metadata=second._metadata)
            assert (await mine.read()).request_id == "same"
            mine.cancel()
            chunks = [chunk async for chunk in theirs]
            assert chunks[-1].finish.reason == "length"
            prefill, _ = await running.idle()
            tenants = {seen.request.tenant: seen.request.attempt.request_id for seen in prefill[1:]}
            assert tenants.keys() == {"acme", "bolts"}
            assert tenants["acme"] != tenants["bolts"]


def wire_sampling():
    return wire.sampling_to_proto(GREEDY)


@pytest.mark.fast
@pytest.mark.asyncio
async def test_operators_and_workers_have_their_own_port(inside, keys, tmp_path):
    operators = Keys(tmp_path / "operators.jsonl")
    key, root = keys.add("ada", "acme"), operators.add("root", "ops")
    async with secured(inside, keys, admin_keys_file=str(operators.path)) as running:
        public = SecureChannels(TlsFiles(ca_file=str(inside.file))).open_aio(running.address)
        header = (("authorization", f"Bearer {key}"),)
        calls = (
            (admin_pb2_grpc.AdminStub(public).Status, admin_pb2.StatusRequest()),
            (admin_pb2_grpc.AdminStub(public).Inventory, admin_pb2.InventoryRequest()),
            (worker_pb2_grpc.MembershipStub(public).Heartbeat, running.workers[0].state()),
        )
        for call, message in calls:
            with pytest.raises(grpc.aio.AioRpcError) as found:
                await call(message, metadata=header, timeout=2.0)
            assert found.value.code() is grpc.StatusCode.UNIMPLEMENTED
        await public.close()
        address, tls = f"127.0.0.1:{running.router.admin_port}", inside.files("operator")
        for wrong in ("", key):
            async with AsyncBatonClient(address, access=Access(tls=tls, api_key=wrong)) as operator:
                with pytest.raises(Unauthenticated):
                    await operator.status()
        async with AsyncBatonClient(address, access=Access(tls=tls, api_key=root)) as operator:
            assert all(worker.alive for worker in (await operator.status()).workers)
            with pytest.raises(BatonError, match="Method not found"):
                await operator.tokenize("hi")


@pytest.mark.asyncio
async def test_certificates_that_are_wrong(inside, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(handshakes, "GRACE_S", 0.2)
    outside, clients = Authority(tmp_path / "outside"), Authority(tmp_path / "clients")
    async with secured(inside, client_ca_file=str(clients.file)) as running:
        good = clients.files("good", ca=inside)
        async with to_public(running, inside, files=good) as client:
            assert await client.generate_text("hi", sampling=GREEDY)
        wrong = {
            "no certificate": TlsFiles(ca_file=str(inside.file)),
            "another authority's": outside.files("stranger", ca=inside),
            "one of the workers'": inside.files("worker", ca=inside),  # is good at the admin port alone
            "expired": clients.files("expired", ca=inside, days=-1),
            "no TLS": TlsFiles(),
            "does not believe the router": clients.files("sceptic", ca=outside),
        }
        for name, files in wrong.items():
            async with to_public(running, inside, files=files) as client:
                with pytest.raises(WorkerLost):
                    await client.generate_text("hi", sampling=GREEDY)
                    pytest.fail(name)
        for name in ("no certificate", "another authority's", "expired", "no TLS"):
            address = f"127.0.0.1:{running.router.admin_port}"
            async with AsyncBatonClient(address, timeout_s=5.0, access=Access(tls=wrong[name])) as operator:
                with pytest.raises(WorkerLost):
                    await operator.status()
                    pytest.fail(name)
        assert len(running.workers[0].seen) == 1
        sample = running.router.metrics.registry.get_sample_value
        for port, num in (("public", len(wrong)), ("admin", 4)):
            async with asyncio.timeout(10.0):
                while (sample("baton_tls_connections_refused_total", {"port": port}) or 0) < num:
                    await asyncio.sleep(0.02)
        assert "connections to the public port came to no call" in caplog.text


@pytest.mark.fast
@pytest.mark.asyncio
async def test_one_port_asks_everybody_for_a_certificate(inside):
    async with cluster(security=RouterSecurity(tls=inside.files("router"))) as running:
        assert running.router.admin_port == running.router.port
        async with to_public(running, inside, files=inside.files("anybody")) as client:
            assert await client.generate_text("hi", sampling=GREEDY, tenant="as I say")
            assert len((await client.status()).workers) == 2
        assert running.workers[0].seen[0].request.tenant == "as I say"
        for files in (TlsFiles(ca_file=str(inside.file)), TlsFiles()):
            async with to_public(running, inside, files=files) as client:
                with pytest.raises(WorkerLost):
                    await client.tokenize("hi")


@pytest.mark.asyncio
async def test_an_expired_router_is_not_believed(inside, monkeypatch):
    monkeypatch.setattr(TlsWatch, "_require_unexpired", lambda self: None)  # as if it expired while it is in use
    async with secured(inside) as running:
        files = inside.files("router", days=-1)
        await asyncio.sleep(0.6)
        async with to_public(running, inside, files=TlsFiles(ca_file=files.ca_file)) as client:
            with pytest.raises(WorkerLost, match="CERTIFICATE_VERIFY_FAILED"):
                await client.tokenize("hi")


@pytest.mark.asyncio
async def test_certificates_change_under_a_stream(inside, tmp_path, caplog):
    """Authority and certificates are replaced while an answer streams; it ends as if nothing had happened."""
    caplog.set_level(logging.INFO)
    after = Authority(tmp_path / "after")
    async with secured(inside) as running:
        running.script.token_delay_s = 0.2
        async with to_public(running, inside) as client, asyncio.timeout(20.0):
            before = [chunk async for chunk in client.generate("hi", sampling=GREEDY)]
            stream = client.generate("hi", sampling=GREEDY)
            first = await anext(stream)
            both = inside.ca.cert_pem.bytes() + after.ca.cert_pem.bytes()
            replace(inside.file, both)  # the first step of a rotation: both authorities are believed
            await asyncio.sleep(0.6)
            authority, inside.ca = inside.ca, after.ca
            inside.issue("router")
            await asyncio.sleep(0.6)
            rest = [chunk async for chunk in stream]
            text = "".join(chunk.text for chunk in before)
            assert "".join(chunk.text for chunk in (first, *rest)) == text
            # New connections, the router's to its workers among them, have the new certificate.
            async with to_public(running, after, files=TlsFiles(ca_file=str(after.file))) as later:
                assert await later.generate_text("hi", sampling=GREEDY) == text
            old = tmp_path / "old.pem"
            replace(old, authority.cert_pem.bytes())
            async with to_public(running, inside, files=TlsFiles(ca_file=str(old))) as behind:
                with pytest.raises(WorkerLost, match="CERTIFICATE_VERIFY_FAILED"):
                    await behind.tokenize("hi")
            # A slip does no harm: what does not fit together is not taken.
            open(f"{inside.folder}/router.key", "w").close()
            await asyncio.sleep(0.6)
            async with to_public(running, after, files=TlsFiles(ca_file=str(after.file))) as later:
                assert await later.tokenize("hi")
        assert "the old ones stay in use" in caplog.text


@pytest.mark.fast
@pytest.mark.asyncio
async def test_limits_of_streams(inside, keys):
    ada, bob = keys.add("ada", "acme"), keys.add("bob", "bolts")
    limits = ClientLimits(max_streams_per_connection=2, max_streams_per_tenant=3)
    async with secured(inside, keys, limits=limits) as running:
        running.script.decode_hangs_after = 0
        clients = [own_connection(running, inside, key) for key in (ada, ada, bob)]
        open_streams = []
        for client, num in zip(clients, (2, 1, 2), strict=True):
            for _ in range(num):
                stream = client.generate("hi", sampling=GREEDY)
                await anext(stream)
                open_streams.append(stream)
        for client, what in zip(clients, ("per_tenant", "per_tenant", "per_connection"), strict=True):
            with pytest.raises(Overloaded, match="the limit") as error:
                await client.generate_text("hi", sampling=GREEDY)
            assert error.value.fields["what"] == f"streams_{what}"
            assert refused(running, f"streams_{what}")
            assert await client.tokenize("hi")  # is no stream
        for stream in open_streams:
            await stream.aclose()
        await running.idle(3.0)
        running.script.decode_hangs_after = None
        assert await clients[0].generate_text("hi", sampling=GREEDY)
        for client in clients:
            await client.close()
    assert (
        not running.router.public.authenticator._accounts and not running.router.public.authenticator._num_of_connection
    )


@pytest.mark.fast
@pytest.mark.asyncio
async def test_limits_of_connections_and_headers(inside, keys):
    ada, bob = keys.add("ada", "acme", max_connections=1), keys.add("bob", "bolts", max_header_bytes=40)
    async with secured(inside, keys) as running:
        running.script.decode_hangs_after = 0
        clients = [own_connection(running, inside, key) for key in (ada, ada, bob)]
        stream = clients[0].generate("hi", sampling=GREEDY)
        await anext(stream)
        kinds = (Overloaded, "connections"), (InvalidRequest, "header_bytes")  # the latter will never be let in
        for client, (kind, what) in zip(clients[1:], kinds, strict=True):
            with pytest.raises(kind) as error:
                await client.generate_text("hi", sampling=GREEDY)
            assert error.value.fields["what"] == what
            assert refused(running, what)
        await stream.aclose()
        await running.idle(3.0)
        running.script.decode_hangs_after = None
        assert await clients[1].generate_text("hi", sampling=GREEDY), "a connection without calls is nobody's"
        for client in clients:
            await client.close()
    assert (
        not running.router.public.authenticator._accounts
        and not running.router.public.authenticator.connections._num_of
    )


def own_connection(running, inside, key=""):
    """Else channels of one process share a connection."""
    client = to_public(running, inside, key)
    options = (("grpc.use_local_subchannel_pool", 1),)
    channel = SecureChannels(TlsFiles(ca_file=str(inside.file))).open_aio(running.address, options)
    client._inference, client._channel = inference_pb2_grpc.InferenceStub(channel), channel
    return client


@pytest.mark.asyncio
async def test_limits_of_messages_prompts_and_connections(inside):
    limits = ClientLimits(max_message_bytes=1 << 20, max_prompt_tokens=10, max_connections=2)
    async with secured(inside, limits=limits) as running:
        clients = [own_connection(running, inside) for _ in range(3)]
        for client in clients[:2]:
            assert await client.generate_text("x" * 10, sampling=GREEDY)
        with pytest.raises(PromptTooLong, match="max_prompt_tokens"):
            await clients[0].generate_text("x" * 11, sampling=GREEDY)
        with pytest.raises(PromptTooLong, match="larger than max"):
            await clients[0].tokenize("x" * (1 << 20))
        with pytest.raises(WorkerLost):
            await clients[2].tokenize("hi")
        await clients[0].close()
        async with asyncio.timeout(10.0):
            while True:
                try:
                    assert await clients[2].tokenize("hi")
                    break
                except WorkerLost:
                    await asyncio.sleep(0.05)
        for client in clients[1:]:
            await client.close()


@pytest.mark.asyncio
async def test_a_connection_without_calls_is_closed_and_opened_again_by_the_next(inside, monkeypatch):
    monkeypatch.setattr(listener, "IDLE_S", 0.2)
    async with secured(inside, limits=ClientLimits(max_connections=1)) as running:
        idle, other = own_connection(running, inside), own_connection(running, inside)
        stream = idle.generate("hi", sampling=GREEDY)
        running.script.decode_hangs_after = 0
        await anext(stream)
        state = idle._channel.get_state()
        async with asyncio.timeout(60.0):
            closed = asyncio.ensure_future(idle._channel.wait_for_state_change(state))
            with pytest.raises(WorkerLost):
                await other.tokenize("hi")
            assert not closed.done(), "a stream is a use of it"
            await stream.aclose()
            await closed
            running.script.decode_hangs_after = None
            while True:
                try:
                    assert await other.tokenize("hi"), "there is room for another client"
                    break
                except WorkerLost:
                    await asyncio.sleep(0.05)
            await other.close()
            while True:
                try:
                    assert await idle.tokenize("hi")
                    break
                except WorkerLost:
                    await asyncio.sleep(0.05)
        await idle.close()


@pytest.mark.fast
@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"api_keys_file": "keys"}, "admin_port"),
        ({"admin_keys_file": "keys"}, "admin_port"),
        ({"client_ca_file": "ca"}, "admin_port"),
        ({"client_ca_file": "ca", "admin_port": 0}, "tls_cert_file"),
        ({"tls": TlsFiles(ca_file="ca")}, "tls_cert_file"),
    ],
)
def test_what_would_protect_nothing_is_refused(config, match):
    with pytest.raises(ConfigInvalid, match=match):
        RouterSecurity(**config)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "host.example"])
@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ({}, "api_keys_file"),
        ({"admin_port": 0, "admin_keys_file": "o"}, "api_keys_file"),
        ({"admin_port": 0, "api_keys_file": "k"}, "admin_keys_file"),
        ({"admin_port": 0, "api_keys_file": "k", "admin_keys_file": "o"}, None),
        ({"tls": TlsFiles(cert_file="c", key_file="k", ca_file="a")}, None),
        ({"tls": TlsFiles(cert_file="c", key_file="k", ca_file="a"), "admin_port": 0}, "api_keys_file"),
    ],
)
def test_a_port_that_other_machines_reach_asks_for_a_credential(host, given, refused):
    security = RouterSecurity(**given)
    for loopback in ("127.0.0.1", "localhost", "::1"):
        security.require_credentials(loopback)
    if refused is None:
        security.require_credentials(host)
        return
    with pytest.raises(ConfigInvalid) as caught:
        security.require_credentials(host)
    assert {"host", refused} <= set(caught.value.fields["keys"])
