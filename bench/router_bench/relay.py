"""`python -m baton.bench.router_bench.relay`: the minimal gRPC server in Python, for comparison.

Without `--upstream` it is a source: it answers `Generate` with a number of chunks, one per step. With it, it relays
every message of every call unchanged, bytes for bytes, with one upstream call per call, and nothing else. It prints
`{"address": ...}` on stdout once it serves, and ends when its stdin closes.
"""

import argparse
import asyncio
import json
import os
import sys
import threading
from collections.abc import AsyncIterator
from typing import Any, Final

import grpc
import grpc.aio

from baton.bench.router_bench.echo_load import METHOD
from baton.proto import inference_pb2

OPTIONS: Final = (("grpc.so_reuseport", 0),)
TOKEN: Final = 300


class Relay:
    """Relays the answers of another server."""

    def __init__(self, upstream: str) -> None:
        channel: Any = grpc.aio.insecure_channel(upstream)
        self._call = channel.unary_stream(METHOD)

    async def generate(self, request: bytes, context: Any) -> None:
        """Serve one call."""
        async for message in self._call(request):
            await context.write(message)


class Source:
    """Emits a token for every call at each step."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._stepped = asyncio.Event()
        self._stepping = asyncio.create_task(self._step())

    async def generate(self, request: bytes, context: Any) -> None:
        """Serve one call."""
        async for message in self._answer(inference_pb2.GenerateRequest.FromString(request)):
            await context.write(message)

    async def _answer(self, request: inference_pb2.GenerateRequest) -> AsyncIterator[bytes]:
        num_tokens = request.sampling.max_tokens
        for index in range(num_tokens):
            if index:
                await self._stepped.wait()
            chunk = inference_pb2.GenerateChunk(index=index, token_ids=[TOKEN], text=" text")
            if index + 1 == num_tokens:
                chunk.finish.reason = "length"
            yield chunk.SerializeToString()

    async def _step(self) -> None:
        loop = asyncio.get_running_loop()
        next_s = loop.time()
        while True:
            next_s = max(next_s + self._step_s, loop.time())
            await asyncio.sleep(next_s - loop.time())
            stepped, self._stepped = self._stepped, asyncio.Event()
            stepped.set()


async def serve(options: argparse.Namespace) -> None:
    """Serve until stdin closes."""
    served: Any = Relay(options.upstream) if options.upstream else Source(options.step_s)
    service, method = METHOD.lstrip("/").split("/")
    handlers = {method: grpc.unary_stream_rpc_method_handler(served.generate)}
    server = grpc.aio.server(options=OPTIONS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(json.dumps({"address": f"127.0.0.1:{port}"}), flush=True)
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    threading.Thread(target=_wait, args=(loop, stop), daemon=True).start()
    await stop.wait()
    await server.stop(0)


def main() -> int:
    """Run the process."""
    parser = argparse.ArgumentParser(
        prog="python -m baton.bench.router_bench.relay", description="A relay without a router."
    )
    parser.add_argument("--upstream", default="", help="address of what it passes on; empty: it is a source")
    parser.add_argument("--step-s", type=float, default=0.02, help="of a source")
    asyncio.run(serve(parser.parse_args()))
    return 0


def _wait(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    while os.read(0, 4096):
        pass
    loop.call_soon_threadsafe(stop.set)


if __name__ == "__main__":
    sys.exit(main())
