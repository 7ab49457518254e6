"""What a connection may take: header bytes, time, and a place among so many."""

import asyncio
import json
from contextlib import asynccontextmanager, suppress

import pytest

from baton.router.openai import connection
from baton.router.openai.connection import ConnectionLimits, Connections, HttpServer

pytestmark = [pytest.mark.fast, pytest.mark.asyncio]


async def app(scope, receive, send):
    """Says how many headers came, after the body has; keeps `/slow` waiting."""
    body = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body += message["body"]
        if not message.get("more_body"):
            break
    if connection.PLACE in scope and scope["path"].startswith("/own/"):
        scope[connection.PLACE].own(scope["path"], 1)
    if scope["path"] == "/slow":
        await asyncio.Event().wait()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@asynccontextmanager
async def listening(serves=app, **limits):
    connections = Connections(ConnectionLimits(**({"max_connections": 8} | limits)))
    server = HttpServer(serves, connections)
    await server.start("127.0.0.1", 0)
    opened = []

    async def dial(data=b""):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        opened.append(writer)
        writer.write(data)
        return reader, writer

    try:
        yield dial, connections
    finally:
        for writer in opened:
            writer.close()
        await server.stop(0.0)


async def status_of(reader):
    async with asyncio.timeout(20):
        head = await reader.readuntil(b"\r\n\r\n")
        size = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        await reader.readexactly(size)
    return int(head.split()[1])


async def ended(reader):
    async with asyncio.timeout(20):
        return await reader.read()


async def test_headers_have_a_limit_whole_or_not():
    async with listening(max_header_bytes=4000) as (dial, _):
        reader, writer = await dial(b"GET / HTTP/1.1\r\nx: " + b"a" * 3000 + b"\r\n\r\n")
        assert await status_of(reader) == 200
        writer.write(b"POST / HTTP/1.1\r\ncontent-length: 9000\r\n\r\n" + b"b" * 9000)  # a body is none
        assert await status_of(reader) == 200
        for head in (
            b"GET / HTTP/1.1\r\nx: " + b"a" * 5000 + b"\r\n\r\n",
            b"GET / HTTP/1.1\r\nx: " + b"a" * 5000,
            b"GET /" + b"a" * 5000,
            b"GET / HTTP/1.1\r\n" + b"x: a\r\n" * 1000,
        ):
            reader, _ = await dial(head)
            assert await status_of(reader) == 431
            assert await ended(reader) == b""


@pytest.mark.long
async def test_headers_that_come_in_drops_and_none_at_all_are_closed_in_time():
    async with listening(head_timeout_s=0.2) as (dial, connections):
        silent, _ = await dial()
        begun, _ = await dial(b"GET / HTTP/1.1\r\nx: ")
        again, writer = await dial(b"GET / HTTP/1.1\r\n\r\n")
        assert await status_of(again) == 200
        writer.write(b"GET / HT")
        for reader in (silent, begun, again):
            assert await status_of(reader) == 408
            assert await ended(reader) == b""
        working, _ = await dial(b"GET /slow HTTP/1.1\r\n\r\n")
        await asyncio.sleep(0.5)
        assert not working.at_eof() and len(connections._open) == 1


async def test_a_connection_too_many_is_refused_unless_an_idle_one_makes_room():
    async with listening(max_connections=2) as (dial, connections):
        busy, _ = await dial(b"GET /slow HTTP/1.1\r\n\r\n")
        idle, _ = await dial(b"GET / HTTP/1.1\r\n\r\n")
        assert await status_of(idle) == 200
        third, _ = await dial(b"GET /slow HTTP/1.1\r\n\r\n")
        assert await ended(idle) == b""
        while len(connections._idle):
            await asyncio.sleep(0.01)
        fourth, _ = await dial(b"GET / HTTP/1.1\r\n\r\n")
        assert await status_of(fourth) == 503
        assert not busy.at_eof() and not third.at_eof()


async def test_places_are_given_back():
    async with listening() as (dial, connections):
        for _ in range(5):
            reader, writer = await dial(b"GET / HTTP/1.1\r\n\r\n")
            assert await status_of(reader) == 200
            writer.close()
        async with asyncio.timeout(20):
            while connections._open:
                await asyncio.sleep(0.01)
        assert not connections._idle and not connections._held.num_of("/own/a")


async def test_one_principal_has_so_many_of_them():
    async with listening() as (dial, connections):
        first, writer = await dial(b"GET /own/a HTTP/1.1\r\n\r\n")
        assert await status_of(first) == 200
        other, _ = await dial(b"GET /own/b HTTP/1.1\r\n\r\n")
        assert await status_of(other) == 200
        second, _ = await dial(b"GET /own/a HTTP/1.1\r\n\r\n")
        assert await status_of(second) == 500  # the app here lets the refusal out
        writer.close()
        async with asyncio.timeout(20):
            while connections._held.num_of("/own/a"):
                await asyncio.sleep(0.01)
        third, _ = await dial(b"GET /own/a HTTP/1.1\r\n\r\n")
        assert await status_of(third) == 200


async def early(scope, receive, send):
    """Replies before any of the body has been read."""
    await send({"type": "http.response.start", "status": 413, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"no"})


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"POST / HTTP/1.0\r\ncontent-length: 8000000\r\n\r\n", 413),
        (b"POST / HTTP/1.1\r\nconnection: close\r\ncontent-length: 8000000\r\n\r\n", 413),
        (b"POST / HTTP/1.1\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n7a1200\r\n", 413),
        (b"POST / HTTP/1.1\r\nx: ", 431),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    ],
)
@pytest.mark.long
async def test_a_reply_reaches_a_client_that_sends_all_before_it_reads(head, status):
    async with listening(early) as (dial, connections):
        reader, writer = await dial(head)
        for _ in range(8):
            writer.write(b"a" * 1_000_000)
            async with asyncio.timeout(20):
                await writer.drain()
        assert await status_of(reader) == status
        assert await ended(reader) == b""
        writer.close()
        async with asyncio.timeout(20):
            while connections._open:
                await asyncio.sleep(0.01)


@pytest.mark.long
async def test_one_that_goes_on_sending_behind_its_reply_makes_room_and_is_closed_in_time():
    request = b"POST / HTTP/1.1\r\nconnection: close\r\ncontent-length: 8000000\r\n\r\n"
    async with listening(early, max_connections=1) as (dial, connections):
        first, _ = await dial(request)
        assert await status_of(first) == 413
        second, _ = await dial(b"GET / HTTP/1.1\r\n\r\n")
        assert await status_of(second) == 413
        assert len(connections._open) == 1
    async with listening(early, linger_s=0.1) as (dial, connections):
        reader, _ = await dial(request)
        assert await status_of(reader) == 413
        async with asyncio.timeout(20):
            while connections._open:
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("begin", [b"0\r\nX: ", b"0\r\n" + b"X: y\r\n" * 100, b"ff;"])
async def test_what_is_around_a_body_has_the_limit_of_headers(begin):
    async with listening(early, max_header_bytes=4000) as (dial, connections):
        reader, writer = await dial(b"GET / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n" + begin)
        assert await status_of(reader) == 413
        writer.write((b"X: y\r\n" if begin.endswith(b"\r\n") else b"aaaaaa") * 1000)
        with suppress(ConnectionError):
            assert await ended(reader) == b""
        async with asyncio.timeout(20):
            while connections._open:
                await asyncio.sleep(0.01)
        assert connections._closed.labels("header_bytes")._value.get() == 1


async def test_trailers_within_the_limit_are_dropped_and_the_connection_goes_on():
    seen = []

    async def names(scope, receive, send):
        while (await receive()).get("more_body"):
            pass
        seen.append([name for name, _ in scope["headers"]])
        await early(scope, receive, send)

    chunked = b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nx: y\r\n\r\n"
    async with listening(names, max_header_bytes=4000) as (dial, _):
        reader, writer = await dial()
        for _ in range(2):
            for at in range(len(chunked)):
                writer.write(chunked[at : at + 1])
                await writer.drain()
            assert await status_of(reader) == 413
        assert seen == [[b"transfer-encoding"]] * 2


@pytest.mark.long
async def test_a_message_without_an_end_is_closed_in_time_behind_its_reply():
    head = b"GET / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"
    async with listening(early) as (dial, connections):
        reader, writer = await dial(head)
        assert await status_of(reader) == 413
        [open_one] = connections._open
        assert open_one._linger_timer is not None
        writer.write(b"0\r\n\r\n")
        async with asyncio.timeout(20):
            while open_one._linger_timer is not None:  # it ended in time
                await asyncio.sleep(0.01)
        writer.write(head)
        assert await status_of(reader) == 413
    async with listening(early, linger_s=0.1) as (dial, connections):
        reader, _ = await dial(head)
        assert await status_of(reader) == 413
        assert await ended(reader) == b""
        assert connections._closed.labels("slow_body")._value.get() == 1


class Generating:
    """Replies to `/long` when it is told to, and knows whether its client went away before."""

    def __init__(self):
        self.is_told = asyncio.Event()
        self.is_gone = asyncio.Event()
        self.has_begun = asyncio.Event()
        self.paths = []

    async def __call__(self, scope, receive, send):
        self.paths.append(scope["path"])
        if scope["path"] != "/long":
            await app(scope, receive, send)
            return
        while (await receive()).get("more_body"):
            pass
        await connection.until_disconnect(receive, self._reply(send))
        self.is_gone.set()

    async def _reply(self, send):
        self.has_begun.set()
        await self.is_told.wait()
        await early(None, None, send)


BEHIND = [
    b"GET / HTTP/1.1\r\n\r\n",
    b"POST / HTTP/1.1\r\ncontent-length: 9\r\n\r\n",
    b"GET / HTTP/1.1\r\n\r\n" * 40,
    b"POST / HTTP/1.1\r\ncontent-length: 900000\r\n\r\n" + b"a" * 800_000,
]


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("behind", BEHIND, ids=["one", "unfinished", "many", "long"])
async def test_the_end_is_seen_while_requests_wait_for_an_earlier_one(behind, is_late):
    serves = Generating()
    async with listening(serves, max_header_bytes=16000) as (dial, connections):
        _, writer = await dial(b"GET /long HTTP/1.1\r\n\r\n" + (b"" if is_late else behind))
        async with asyncio.timeout(20):
            await serves.has_begun.wait()
            writer.write(behind if is_late else b"")
            await writer.drain()
            writer.close()
            await serves.is_gone.wait()
        assert serves.paths == ["/long"] and not connections._open


async def test_what_waits_has_a_limit_and_the_reply_under_way_is_whole():
    serves = Generating()
    async with listening(serves, max_header_bytes=16000) as (dial, connections):
        for behind, num in ((BEHIND[0] * 5, 5), (BEHIND[2], 0), (BEHIND[3], 0)):
            serves.is_told.clear()
            reader, writer = await dial(b"GET /long HTTP/1.1\r\n\r\n" + behind)
            async with asyncio.timeout(20):
                await writer.drain()
            serves.is_told.set()
            assert await status_of(reader) == 413
            for _ in range(num):
                assert await status_of(reader) == 200
            if not num:
                assert await ended(reader) == b""
        assert connections._closed.labels("waiting_bytes")._value.get() == 2


async def test_any_number_of_requests_may_wait_one_after_the_other():
    async with listening(Generating(), max_header_bytes=16000) as (dial, connections):
        reader, writer = await dial()
        for _ in range(60):
            writer.write(BEHIND[0] * 3)
            for _ in range(3):
                assert await status_of(reader) == 200
        assert connections._closed.labels("waiting_bytes")._value.get() == 0


async def test_what_is_no_http_is_said_in_json_and_logged_no_more_often_than_every_few_seconds(caplog):
    async with listening() as (dial, connections):
        for data in (
            b"\x00\x01\x02\r\n\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"GET / HTTP/1.1\nhost: x\n\n",
            b"POST / HTTP/1.1\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
            b"POST / HTTP/1.1\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello!",
        ):
            reader, writer = await dial(data)
            head, body = (await ended(reader)).split(b"\r\n\r\n", 1)
            assert head.startswith(b"HTTP/1.1 400 ")
            assert json.loads(body)["error"]["code"] == "invalid_http"
            writer.close()
        assert connections._closed.labels("no_http")._value.get() == 5
        assert [record.name for record in caplog.records] == [connection.__name__]


@pytest.mark.parametrize("rest", [b"zz\r\n", b"f" * 20 + b"\r\n", b"2\r\nokXX", b"2\r\nok\r\n-1\r\n"])
@pytest.mark.parametrize("at_once", [True, False])
async def test_a_body_that_is_no_http_is_refused_in_words(rest, at_once):
    seen, gone = asyncio.Event(), asyncio.Event()

    async def reads(scope, receive, send):
        seen.set()
        while (message := await receive())["type"] != "http.disconnect":
            assert message.get("more_body")
        await early(scope, receive, send)  # must not follow the refusal
        gone.set()

    async with listening(reads) as (dial, connections):
        head = b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"
        reader, writer = await dial(head + rest if at_once else head)
        if not at_once:
            await seen.wait()
            writer.write(rest)
        said, body = (await ended(reader)).split(b"\r\n\r\n", 1)
        assert said.startswith(b"HTTP/1.1 400 ")
        assert json.loads(body)["error"]["code"] == "invalid_http"
        async with asyncio.timeout(5):  # and not with the connection
            await gone.wait()
        writer.close()
        async with asyncio.timeout(20):
            while connections._open:
                await asyncio.sleep(0.01)


async def test_a_body_that_is_no_http_behind_its_reply_or_another_request_adds_nothing():
    head = b"POST /slow HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"
    begun = asyncio.Event()

    async def begins(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        begun.set()
        await asyncio.Event().wait()

    async with listening() as (dial, _):
        reader, _ = await dial(b"GET /slow HTTP/1.1\r\n\r\n" + head + b"zz\r\n")
        assert await ended(reader) == b""
    async with listening(begins) as (dial, _):
        reader, writer = await dial(head)
        await begun.wait()
        writer.write(b"zz\r\n")
        assert b" 400 " not in await ended(reader)


async def test_an_upgrade_is_answered_without_it(caplog):
    async with listening() as (dial, _):
        for name in (b"h2c", b"websocket"):
            head = b"GET / HTTP/1.1\r\nconnection: upgrade\r\nupgrade: " + name + b"\r\n\r\n"
            reader, writer = await dial(head)
            assert await status_of(reader) == 200
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            assert await status_of(reader) == 200
        assert not caplog.records


async def test_garbage_behind_a_request_does_not_go_into_its_reply():
    async with listening() as (dial, _):
        reader, _ = await dial(b"GET /slow HTTP/1.1\r\n\r\n\x00\x01")
        assert await ended(reader) == b""


class CountingTransport:
    """A transport that records what is written to it."""

    def __init__(self, transport, written):
        self._transport, self._written = transport, written

    def __getattr__(self, name):
        return getattr(self._transport, name)

    def write(self, data):
        self._written.append(data)
        self._transport.write(data)


GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
BEGIN = {"type": "http.response.start", "status": 200, "headers": []}


def part(body, *, is_last=False):
    return {"type": "http.response.body", "body": body, "more_body": not is_last}


async def test_what_a_reply_says_in_one_pass_is_sent_in_one_piece_and_before_it_waits():
    written, goes_on = [], asyncio.Event()

    async def serves(scope, receive, send):
        place = scope[connection.PLACE]
        place.transport = CountingTransport(place.transport, written)
        await send(BEGIN)
        await send(part(b"first"))
        await goes_on.wait()
        for body in (b"second", b"third"):
            await send(part(body))
        await send(part(b"last", is_last=True))

    async with listening(serves) as (dial, _), asyncio.timeout(20):
        reader, _ = await dial(GET)
        assert (await reader.readuntil(b"first\r\n")).startswith(b"HTTP/1.1 200")
        goes_on.set()
        assert await reader.readuntil(b"\r\n0\r\n\r\n") == b"6\r\nsecond\r\n5\r\nthird\r\n4\r\nlast\r\n0\r\n\r\n"
    assert len(written) == 2


async def test_replies_of_one_pass_are_sent_after_all_of_them_have_spoken():
    written, waiting, goes_on = [], asyncio.Semaphore(0), asyncio.Event()
    said_then = []

    async def serves(scope, receive, send):
        place = scope[connection.PLACE]
        await send(BEGIN)
        await send(part(b"first"))
        waiting.release()
        await goes_on.wait()
        place.transport = CountingTransport(place.transport, written)
        await send(part(b"second"))
        said_then.append(len(written))
        await asyncio.Event().wait()

    async with listening(serves) as (dial, _), asyncio.timeout(20):
        readers = [(await dial(GET))[0] for _ in range(5)]
        for reader in readers:
            await waiting.acquire()
            await reader.readuntil(b"first\r\n")
        goes_on.set()
        for reader in readers:
            assert await reader.readuntil(b"second\r\n") == b"6\r\nsecond\r\n"
    assert said_then == [0] * 5 and len(written) == 5


async def test_a_reply_that_never_waits_is_held_up_by_a_client_that_does_not_read():
    num_sent, has_begun, body = 0, asyncio.Event(), bytes(1 << 20)

    async def serves(scope, receive, send):
        nonlocal num_sent
        await send(BEGIN)
        has_begun.set()
        for _ in range(256):
            await send(part(body))
            num_sent += 1
        await send(part(b"", is_last=True))

    async with listening(serves) as (dial, _), asyncio.timeout(60):
        reader, _ = await dial(GET)
        await has_begun.wait()
        assert num_sent < 256
        await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(256 * (len(b"100000\r\n") + len(body) + 2) + len(b"0\r\n\r\n"))
    assert num_sent == 256
