"""Who may not: certificates for another name, keys over HTTP, another tenant's request by any call that takes an id.

Certificates over gRPC and its keys are in `test_security.py`, workers' own ports in `tests/worker/test_host_tls.py`.
"""

import asyncio
import ssl
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import httpx2
import pytest
from google.protobuf import message_factory

from baton.client import Access, AsyncBatonClient
from baton.core.errors import WorkerLost
from baton.core.tls_files import TlsFiles
from baton.proto import admin_pb2, inference_pb2, kv_pb2, wire, worker_pb2
from baton.proto.secure_channel import SecureChannels
from baton.router.access.api_keys import KeyEntry, digest_of, new_key
from baton.router.access.security import RouterSecurity
from baton.tests.router.certificates import Authority
from baton.tests.router.fakes import cluster
from baton.tests.router.openai.served import served
from baton.tests.router.test_security import GREEDY, Keys, secured, to_public
from baton.tests.worker.test_host_tls import ask, make_host

pytestmark = pytest.mark.fast
ELSEWHERE = ("elsewhere.example",)
PAST = "2020-01-01T00:00:00+00:00"
MODULES = (inference_pb2, admin_pb2, worker_pb2, kv_pb2)


@pytest.fixture
def inside(tmp_path):
    return Authority(tmp_path / "inside")


@pytest.fixture
def keys(tmp_path):
    return Keys(tmp_path / "keys.jsonl")


@pytest.mark.asyncio
async def test_a_router_whose_certificate_is_for_another_name_is_not_believed(inside):
    tls = inside.files("router", names=ELSEWHERE)
    async with cluster(0, 0, security=RouterSecurity(tls=tls, admin_port=0)) as running:
        async with to_public(running, inside) as client:
            with pytest.raises(WorkerLost):
                await client.tokenize("hi")
        named = TlsFiles(ca_file=str(inside.file), server_name=ELSEWHERE[0])
        async with AsyncBatonClient(running.address, access=Access(tls=named)) as client:
            assert await client.tokenize("hi")


def test_a_worker_whose_certificate_is_for_another_name_is_not_believed(inside):
    host = make_host(inside.files("worker", names=ELSEWHERE))
    try:
        with pytest.raises(grpc.RpcError) as caught:
            ask(host, inside.files("router"))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    finally:
        host.close()


@asynccontextmanager
async def over_http(security, files):
    """A router with HTTP, and a client that shows these certificates."""
    async with served(security=security) as (running, _):
        context = ssl.create_default_context(cafile=files.ca_file)
        if files.cert_file:
            context.load_cert_chain(files.cert_file, files.key_file)
        async with httpx2.AsyncClient(verify=context) as http:
            yield running, http, running.url.replace("http://", "https://")


@pytest.mark.long
@pytest.mark.asyncio
async def test_certificates_over_http(inside, tmp_path):
    outside, clients = Authority(tmp_path / "outside"), Authority(tmp_path / "clients")
    security = RouterSecurity(tls=inside.files("router"), client_ca_file=str(clients.file), admin_port=0)
    async with over_http(security, clients.files("good", ca=inside)) as (running, http, url):
        assert (await http.get(f"{url}/v1/models")).status_code == 200
        wrong = {
            "no certificate": TlsFiles(ca_file=str(inside.file)),
            "another authority's": outside.files("stranger", ca=inside),
            "one of the workers'": inside.files("worker", ca=inside),
            "expired": clients.files("expired", ca=inside, days=-1),
        }
        for name, files in wrong.items():
            context = ssl.create_default_context(cafile=files.ca_file)
            if files.cert_file:
                context.load_cert_chain(files.cert_file, files.key_file)
            async with httpx2.AsyncClient(verify=context) as stranger:
                with pytest.raises(httpx2.TransportError):
                    await stranger.get(f"{url}/health")
                    pytest.fail(name)
        for names, days in ((ELSEWHERE, None), (("localhost", "127.0.0.1"), -1)):
            inside.files("router", names=names, days=days)
            await asyncio.sleep(0.6)
            async with httpx2.AsyncClient(verify=ssl.create_default_context(cafile=str(inside.file))) as client:
                with pytest.raises(httpx2.TransportError, match="CERTIFICATE_VERIFY_FAILED"):
                    await client.get(f"{url}/health")
        assert not running.workers[0].seen


@pytest.mark.asyncio
async def test_keys_over_http_that_are_not_good(inside, keys):
    expired, gone, good = new_key(), keys.add("gone", "acme"), keys.add("ada", "acme")
    keys.entries["late"] = KeyEntry(name="late", tenant="acme", sha256=digest_of(expired), expires=PAST)
    keys.entries.pop("gone")
    keys.write()
    security = RouterSecurity(tls=inside.files("router"), api_keys_file=str(keys.path), admin_port=0)
    async with over_http(security, TlsFiles(ca_file=str(inside.file))) as (running, http, url):
        headers = {"none": None, "unknown": f"Bearer {new_key()}", "revoked": f"Bearer {gone}"}
        headers |= {"expired": f"Bearer {expired}", "half": f"Bearer {good[:-1]}", "kind": f"Basic {good}"}
        headers |= {"two": f"Bearer {good}, Bearer {gone}", "two words": f"Bearer {good} {good}"}
        said = {}
        for path, body in (("/v1/completions", {"prompt": "hi"}), ("/tokenize", {"prompt": "hi"}), ("/metrics", None)):
            for name, header in headers.items():
                more = {"headers": {"authorization": header} if header else {}}
                reply = await (
                    http.get(url + path, **more) if body is None else http.post(url + path, json=body, **more)
                )
                assert (reply.status_code, reply.json()["error"]["code"]) == (401, "unauthenticated"), (path, name)
                said[name] = reply.text
                for secret in (good, gone, expired, "acme", "ada"):
                    assert secret not in reply.text
        assert said["unknown"] == said["revoked"] == said["half"], "nobody learns that there was such a key"
        assert "not `Bearer KEY`" in said["two"]
        assert said["two"] == said["two words"] == said["kind"]
        for name in ("authorization", "x-api-key"):
            prefix = "Bearer " if name == "authorization" else ""
            for others in ([good, good], [good, gone], [gone, good]):
                several = [(name, prefix + key) for key in others]
                reply = await http.post(f"{url}/v1/completions", json={"prompt": "hi"}, headers=several)
                assert (reply.status_code, reply.json()["error"]["code"]) == (401, "unauthenticated"), several
        assert not running.workers[0].seen
        reply = await http.post(
            f"{url}/v1/completions", json={"prompt": "hi"}, headers={"authorization": f"Bearer {good}"}
        )
        assert reply.status_code == 200


def methods():
    """(service, method) of everything there is."""
    for module in MODULES:
        for service in module.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                yield service, method


def takes_an_id(descriptor, depth=0):
    """Whether a message can name a request."""
    names = {field.name for field in descriptor.fields}
    inner = [field.message_type for field in descriptor.fields if field.message_type]
    return bool(names & {"request_id", "attempt"}) or (depth < 4 and any(takes_an_id(one, depth + 1) for one in inner))


def test_which_calls_name_a_request():
    """A new one must be considered in the test below. The hand-off's packets hold such names in bytes."""
    found = {f"{service.name}/{method.name}" for service, method in methods() if takes_an_id(method.input_type)}
    to_workers = {"Prefill/RunAll", "Decode/AttendAll"}
    assert found == {"Inference/Generate"} | to_workers
    assert takes_an_id(kv_pb2.Control.DESCRIPTOR)


def filled(descriptor, request_id):
    """A message that names the request wherever it can."""
    message = message_factory.GetMessageClass(descriptor)()
    if "request_id" in descriptor.fields_by_name:
        message.request_id = request_id
    if "attempt" in descriptor.fields_by_name:
        message.attempt.request_id, message.attempt.attempt = request_id, 1
    return message.SerializeToString()


@pytest.mark.asyncio
@pytest.mark.long
async def test_nobody_reaches_another_tenants_request_by_any_call(inside, keys, tmp_path):
    """While one tenant's answer streams, another with a key and a certificate of its own tries everything there is."""
    ada, bob = keys.add("ada", "acme"), keys.add("bob", "bolts")
    clients = Authority(tmp_path / "clients")
    security = {"client_ca_file": str(clients.file)}
    async with secured(inside, keys, **security) as running:
        mine, theirs = clients.files("ada", ca=inside), clients.files("bob", ca=inside)
        async with to_public(running, inside, ada, mine) as first, to_public(running, inside, bob, theirs) as second:
            want = [
                token for chunk in [c async for c in first.generate("hi", sampling=GREEDY)] for token in chunk.token_ids
            ]
            request = inference_pb2.GenerateRequest(
                text="hi", request_id="of-ada", sampling=wire.sampling_to_proto(GREEDY)
            )
            running.script.decode_hangs_after = 2
            stream = first._inference.Generate(request, metadata=first._metadata)
            got = list((await stream.read()).token_ids)
            inner_id = running.workers[0].seen[-1].request.attempt.request_id
            assert inner_id.startswith("of-ada-")
            for request_id in ("of-ada", inner_id):
                await try_everything(running, second, theirs, request_id)
            running.of("decode")[0].seen[1].hang.set()
            while (chunk := await stream.read()) is not grpc.aio.EOF:
                got += chunk.token_ids
        assert got == want, "the answer was touched"
        attempts = [seen for seen in running.workers[0].seen if seen.request.attempt.request_id == inner_id]
        assert len(attempts) == 1 and not attempts[0].cancelled


def end_of(call, given, metadata):
    """How a call is refused. Not by asyncio's channel: where a refusal comes before the first message has gone, that
    one says INTERNAL, and not what the server said."""
    with pytest.raises(grpc.RpcError) as refused:
        for _ in call(given, metadata=metadata, timeout=60.0):
            pytest.fail("it was answered")
    return refused.value


async def try_everything(running, client, files, request_id):
    with SecureChannels(files).open(running.address) as public:
        for service, method in methods():
            path = f"/{service.full_name}/{method.name}"
            if service.name == "Inference":
                continue
            call = public.stream_stream(path) if method.client_streaming else public.unary_stream(path)
            data = filled(method.input_type, request_id)
            given = iter([data]) if method.client_streaming else data
            refused = await asyncio.to_thread(end_of, call, given, client._metadata)
            assert refused.code() is grpc.StatusCode.UNIMPLEMENTED, path
            assert "acme" not in (refused.details() or "")
    # The only call that takes an id begins a request of one's own, and to leave it ends no other.
    request = inference_pb2.GenerateRequest(text="hi", request_id=request_id, sampling=wire.sampling_to_proto(GREEDY))
    own = client._inference.Generate(request, metadata=client._metadata)
    assert (await own.read()).index == 0
    assert running.workers[0].seen[-1].request.tenant == "bolts"
    own.cancel()
    request.tenant = "acme"
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await client._inference.Generate(request, metadata=client._metadata).read()
    assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert "acme" not in (refused.value.details() or "")
    # Workers and operators have ports of their own, where a client's certificate is none.
    ports = [worker.port for worker in running.workers] + [running.router.admin_port]
    for port in ports:
        async with SecureChannels(files).open_aio(f"127.0.0.1:{port}") as channel:
            for path in ("Decode/AttendAll", "Prefill/RunAll", "Admin/Status"):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await channel.unary_unary(f"/baton.v1.{path}")(b"", timeout=60.0)
                assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
