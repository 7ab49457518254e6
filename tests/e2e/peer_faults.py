"""Faults 22, 25 and 27: peers that speak wrongly, are not who they should be, or do not fit."""

import asyncio
import contextlib
import shutil
import tempfile
from pathlib import Path

import grpc
import zmq
import zmq.asyncio

from baton.client import Access, AsyncBatonClient
from baton.core.errors import (
    BatonError,
    InvalidRequest,
    MalformedMessage,
    ModelNotFound,
    PermissionDenied,
    Unauthenticated,
    WorkerLost,
)
from baton.core.tls_files import TlsFiles
from baton.proto import inference_pb2, wire
from baton.proto.secure_channel import SecureChannels
from baton.router.access.api_keys import KeyEntry, digest_of, new_key
from baton.router.access.security import RouterSecurity
from baton.tests.e2e.checker import Clients
from baton.tests.e2e.fault_run import errors_of
from baton.tests.e2e.fleet import Fleet, wait_until
from baton.tests.inside import worker_channel
from baton.tests.router.certificates import Authority
from baton.tests.worker.streams import ATTEND_ALL, RUN_ALL, ends_in, opening

GARBAGE = (b"\xff" * 40, b"\x0a\xff\xff\xff\xff\x0f", b"\x08\x96\x01" * 9, b"{}", b"\x12\x05\x0a\x03\xff")


async def _raw_call(address, method, data, worker=None):
    async with grpc.aio.insecure_channel(address) as plain:
        if worker is None:
            call = plain.unary_stream(method)(data, timeout=10.0)
        else:
            channel = worker_channel(plain, worker.name.partition("-")[0], worker.name, worker.epoch)
            call = channel.stream_stream(method)(timeout=10.0)
        try:
            if worker is not None:
                await call.write(data)
            async for frame in call:
                if worker is not None and (ended := ends_in(method, frame)):
                    call.cancel()
                    return ended[0]
        except grpc.RpcError as error:
            return wire.error_from_rpc(error)
    return None


async def malformed(run):
    """Bytes that are no message, at every port; fields that fit no model. Streams beside them do not notice."""
    run.stream()
    await run.hit("decoding")
    front = f"127.0.0.1:{run.fleet.router.port}"
    places = [(front, "/baton.v1.Inference/Generate", None)]
    places += [(worker.calls.address, RUN_ALL, worker) for worker in run.fleet.of("prefill")]
    places += [(worker.calls.address, ATTEND_ALL, worker) for worker in run.fleet.of("decode")]
    for address, method, worker in places:
        for data in GARBAGE:
            error = await _raw_call(address, method, data if worker is None else opening(data), worker)
            assert isinstance(error, InvalidRequest), (method, data, error)
        assert isinstance(await _raw_call(address, method, GARBAGE[0], worker), MalformedMessage)
    run.stream(4)
    for worker in run.fleet.of("decode"):
        await _hostile_hand_off(worker.kv_port)
    wrong = inference_pb2.GenerateRequest(model="another", token_ids=inference_pb2.TokenIds(ids=[5]))
    error = await _raw_call(front, "/baton.v1.Inference/Generate", wrong.SerializeToString())
    assert isinstance(error, ModelNotFound)
    await run.over()


async def _hostile_hand_off(port):
    """No ZMQ, then ZMQ that is no KVP."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    with contextlib.suppress(ConnectionError):
        writer.write(b"GET / HTTP/1.1\r\n\r\n" * 20)
        await writer.drain()
    writer.close()
    context = zmq.asyncio.Context()
    try:
        socket = context.socket(zmq.DEALER)
        socket.connect(f"tcp://127.0.0.1:{port}")
        for data in GARBAGE:
            await socket.send(data)
            await socket.send_multipart([b"KVP2" + data, data])
            await socket.send_multipart([data] * 5)
        await asyncio.sleep(0.3)
    finally:
        context.destroy(linger=0)


async def misfit(run):
    """A decode worker of another dtype comes, whose KV would mean nothing: pairs with it are refused, and named."""
    await run.fleet.add("decode-2", dtype="float32")
    async with run.admin() as client:

        async def is_named():
            if len(run.open_ids) < 3:
                run.stream()
            pairs = (await client.status()).refused_pairs
            return {pair.prefill_worker for pair in pairs if pair.decode_worker == "decode-2"} == {
                "prefill-0",
                "prefill-1",
            }

        await run.hit("admitted")
        await wait_until(is_named, 60.0, "nobody has refused what does not fit")
        await run.over()
        run.stream()
        await run.over()
    assert not any("decode-2" in one.workers for one in run.deliveries)
    await run.fleet.remove("decode-2")


async def impostors(run):
    """TLS on every way, a key for every client: who has none, an old one or a stranger's is refused at each port."""
    folder = Path(tempfile.mkdtemp(prefix="baton-faults-"))
    try:
        await _impostors(run, Authority(folder / "inside"), Authority(folder / "outside"), folder / "keys.jsonl")
    finally:
        shutil.rmtree(folder)


async def _impostors(run, inside, outside, path):
    keys = {name: new_key() for name in ("ada", "bob")}
    old = new_key()

    def write(**entries):
        lines = [KeyEntry(name=name, tenant=name, sha256=digest_of(key)).to_line() for name, key in entries.items()]
        past = KeyEntry(name="old", tenant="old", sha256=digest_of(old), expires="2020-01-01T00:00:00+00:00")
        path.write_text("\n".join([*lines, past.to_line()]) + "\n")

    write(**keys)
    files = inside.files("worker")
    as_dict = {name: getattr(files, name) for name in ("cert_file", "key_file", "ca_file")}
    transfer = {"transport": "grpc"} | {f"tls_{name}": value for name, value in as_dict.items()}
    security = RouterSecurity(tls=inside.files("router"), api_keys_file=str(path), admin_port=0)
    fleet = Fleet(("prefill-0", "decode-0"), config={"tls": as_dict}, transfer=transfer, security=security)
    run.fleet = fleet
    await fleet.start()
    try:
        address, tls = f"127.0.0.1:{fleet.router.port}", TlsFiles(ca_file=str(inside.file))

        def clients(key, tls=tls):
            made = SecureChannels(tls).open_aio(address)
            return Clients(address, "", made, (("authorization", f"Bearer {key}"),) if key else ())

        good = clients(keys["ada"])
        run.use(good)
        run.stream()
        await run.hit("decoding")
        wrong = [(clients(key), Unauthenticated) for key in ("", new_key(), old)]
        wrong += [(clients(keys["ada"], TlsFiles(ca_file=str(outside.file))), WorkerLost)]
        wrong += [(Clients(address, ""), WorkerLost)]
        for one, kind in wrong:
            (refused,) = run.stream(1, clients=one, allowed=(kind,), must_fail=True)
            await run.over([refused])
            text = str(refused.error)
            assert not any(name in text for name in ("ada", "bob", "prefill", str(path))), text
            await one.close()
        write(ada=keys["ada"])

        async def is_revoked():
            (late,) = run.stream(1, clients=revoked, allowed=(Unauthenticated,))
            await run.over([late])
            return isinstance(late.error, Unauthenticated)

        revoked = clients(keys["bob"])
        await wait_until(is_revoked, 30.0, "a key that was taken away still opens")
        await revoked.close()
        await _strangers(run, fleet, inside, outside, keys["ada"])
        await run.over()
        assert len(errors_of(run.deliveries)) >= 6
        await wait_until(lambda: _nothing_held(fleet), 30.0, "everything is given back")
    finally:
        await run.close()
        await fleet.close()


async def _nothing_held(fleet):
    return not await fleet.held()


async def _strangers(run, fleet, inside, outside, key):
    """Operators and workers who are none."""
    stranger = outside.files("stranger", ca=inside)
    for tls in (TlsFiles(ca_file=str(inside.file)), stranger, inside.files("late", days=-1)):
        address = f"127.0.0.1:{fleet.router.admin_port}"
        async with AsyncBatonClient(address, timeout_s=10.0, access=Access(tls=tls, api_key=key)) as client:
            try:
                await client.status()
            except BatonError as error:
                assert isinstance(error, WorkerLost | PermissionDenied | Unauthenticated), error
            else:
                raise AssertionError("a stranger is let in as operator")
    for worker in fleet.workers.values():
        for tls in (TlsFiles(), stranger):
            channel = SecureChannels(tls).open_aio(worker.calls.address)
            try:
                call = channel.unary_unary("/baton.v1.Admin/Inventory")
                await call(b"", timeout=10.0)
            except grpc.RpcError as error:
                assert error.code() is grpc.StatusCode.UNAVAILABLE, error
            else:
                raise AssertionError("a stranger is let in at a worker")
            finally:
                await channel.close()
