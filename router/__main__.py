"""`python -m baton.router`: the router as a plain process. Says `{"grpc_port": N}` on stdout once it listens.

It ends on SIGTERM or SIGINT, and with `--exit-with-parent` when its stdin closes. An error at the start is one line on
stderr, the error's JSON, and exit code 3.
"""

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from prometheus_client import start_http_server

from baton.core.errors import BatonError, PortInUse
from baton.router.served_model import ServedModel
from baton.router.server import RouterConfig, RouterServer

EXIT_OK = 0
EXIT_PRECONDITION = 3


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line; argparse exits with 2 if it is wrong."""
    parser = argparse.ArgumentParser(prog="python -m baton.router", description="Baton's front door.")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=50051, help="0 picks a free one")
    parser.add_argument("--model-name", required=True, help="what clients call the model")
    parser.add_argument("--model-path", type=Path, required=True, help="directory with tokenizer.json and config.json")
    parser.add_argument("--weights", choices=("checkpoint", "random"), default="checkpoint", help="what workers load")
    parser.add_argument("--max-queue-len", type=_positive_int, default=256, help="requests in flight; more are refused")
    parser.add_argument("--request-timeout-s", type=_positive_float, default=600.0, help="longest life of a request")
    parser.add_argument("--metrics-port", type=int, help="serve Prometheus metrics over HTTP here; 0 picks a free one")
    parser.add_argument("--exit-with-parent", action="store_true", help="end when stdin closes")
    return parser.parse_args(arguments)


async def serve(options: argparse.Namespace, stop: asyncio.Event) -> None:
    """Serve until `stop` is set.

    Raises:
        StartupError: the model directory or a port is not usable.
    """
    model = ServedModel.from_directory(options.model_name, options.model_path, weights=options.weights)
    config = RouterConfig(
        host=options.host,
        port=options.port,
        max_queue_len=options.max_queue_len,
        request_timeout_s=options.request_timeout_s,
    )
    router = RouterServer(config, model)
    await router.start()
    try:
        ports = {"grpc_port": router.port}
        close_metrics = None
        if options.metrics_port is not None:
            ports["metrics_port"], close_metrics = _serve_metrics(options.host, options.metrics_port, router)
        print(json.dumps(ports), flush=True)
        await stop.wait()
        if close_metrics is not None:
            close_metrics()
    finally:
        await router.stop()


async def run(options: argparse.Namespace) -> None:
    """Serve until a signal or the parent's end.

    Raises:
        StartupError: see `serve`.
    """
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if options.exit_with_parent:
        threading.Thread(target=_wait_for_parent, args=(loop, stop), name="parent-watch", daemon=True).start()
    await serve(options, stop)


def main(arguments: Sequence[str] | None = None) -> int:
    """The process."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        asyncio.run(run(options))
    except BatonError as error:
        print(error.to_wire(), file=sys.stderr, flush=True)
        return EXIT_PRECONDITION
    return EXIT_OK


def _wait_for_parent(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    while os.read(0, 4096):
        pass
    if not loop.is_closed():
        loop.call_soon_threadsafe(stop.set)


def _serve_metrics(host: str, port: int, router: RouterServer) -> tuple[int, Callable[[], None]]:
    try:
        server, _ = start_http_server(port, addr=host, registry=router.metrics.registry)
    except OSError as error:
        raise PortInUse(f"metrics port {port} on {host}: {error.strerror}", host=host, port=port) from error

    def close() -> None:
        server.shutdown()
        server.server_close()

    return server.server_port, close


def _positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def _positive_float(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


if __name__ == "__main__":
    sys.exit(main())
