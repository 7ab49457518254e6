"""Runs the router as a plain process: `python -m baton.router`. It prints `{"grpc_port": N}` once it listens.

SIGTERM or SIGINT drains the router: it accepts nothing new, and running requests may finish within
`--shutdown-grace-s`. A second signal ends it at once; with `--exit-with-parent`, so does the end of stdin. An error at
start-up is printed to stderr as one line of JSON, and the exit code is 3.
"""

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvloop

from baton.core import garbage
from baton.core.clock import MonotonicClock
from baton.core.errors import BatonError
from baton.core.files import raise_file_limit
from baton.core.telemetry.logs import configure_logging
from baton.core.telemetry.telemetry import Telemetry, TelemetryConfig
from baton.router.access.flags import add_flags, count, port, security_of
from baton.router.access.metrics_port import serve_metrics
from baton.router.admission import admission
from baton.router.attempt.migration import MigrationConfig
from baton.router.metrics import SpanCollector
from baton.router.openai.advised_sampling import advised_sampling
from baton.router.openai.chat_template import ChatTemplate
from baton.router.openai.front import HttpConfig
from baton.router.placement.canary import CanaryConfig
from baton.router.served_model import ServedModel
from baton.router.server import RouterConfig, RouterServer

EXIT_OK = 0
EXIT_PRECONDITION = 3


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line; argparse exits with 2 if it is wrong."""
    parser = argparse.ArgumentParser(prog="python -m baton.router", description="Baton's front door.")
    add_flags(parser)
    parser.add_argument("--port", type=port, default=50051, help="gRPC; 0 picks a free one")
    parser.add_argument("--model-name", required=True, help="what clients call the model")
    parser.add_argument("--model-alias", action="append", default=[], help="another name that clients may use")
    parser.add_argument("--model-path", type=Path, required=True, help="directory with tokenizer.json and config.json")
    parser.add_argument("--operator-key-digest", default="", help="SHA-256 of one more key that operators may present")
    parser.add_argument(
        "--follows-workers",
        type=count,
        default=0,
        help="of a router before this one: requests wait a moment until so many are heard",
    )
    parser.add_argument("--exit-with-parent", action="store_true", help="end when stdin closes")
    options = parser.parse_args(arguments)
    if options.chat_template and options.http_port is None:
        parser.error("argument --chat-template: only HTTP has chats: give --http-port, too")
    if options.tool_call_parser != "auto" and options.http_port is None:
        parser.error("argument --tool-call-parser: only HTTP has chats: give --http-port, too")
    if options.quarantine_deaths == 1:
        parser.error("argument --quarantine-deaths: one death says nothing about who was there; 0, 2 or more")
    return options


async def serve(options: argparse.Namespace, ending: "ProcessEnd") -> None:
    """Serve until `ending` requests a drain or an immediate end.

    Raises:
        StartupError: the model directory or a port is not usable.
    """
    weights = "random" if options.load_format == "dummy" else "checkpoint"
    model = ServedModel.from_directory(options.model_name, options.model_path, weights=weights)
    model = replace(model, aliases=tuple(options.model_alias))
    config = RouterConfig(
        host=options.host,
        port=options.port,
        max_queue_len=options.max_queue_len,
        request_timeout_s=options.request_timeout_s,
        migration=MigrationConfig(
            max_migrations=options.max_migrations if options.migration else 0,
            wait_s=options.migration_wait_s,
            drain_grace_s=options.drain_grace_s,
            quarantine_deaths=options.quarantine_deaths,
            quarantine_s=options.quarantine_s,
        ),
        routing=options.routing,
        local_prefill=options.local_prefill,
        canary=CanaryConfig(idle_s=options.canary_idle_s),
        max_wait_s=options.max_wait_s,
        security=security_of(options),
        http=_http_config(options),
        log_requests=options.log_requests,
        follows_workers=options.follows_workers,
    )
    telemetry = Telemetry(_telemetry(options), "router", MonotonicClock())
    router = RouterServer(config, model, tracer=telemetry.tracer)
    if telemetry.tracer is not None:
        router.metrics.registry.register(SpanCollector(lambda: telemetry.num_dropped))
    await router.start()
    router.warm_up()
    shed = asyncio.create_task(admission.watch(router.metrics))
    garbage.begin_to_serve()
    try:
        ports = {"grpc_port": router.port}
        if config.security.admin_port is not None:
            ports["admin_port"] = router.admin_port
        if router.http_port is not None:
            ports["http_port"] = router.http_port
        close_metrics = None
        if options.metrics_port is not None:
            ports["metrics_port"], close_metrics = serve_metrics(
                options.host, options.metrics_port, router.metrics.registry, config.security.tls
            )
        print(json.dumps(ports), flush=True)
        await ending.drain.wait()
        await ending.unless_now(router.drain(options.shutdown_grace_s))
        if close_metrics is not None:
            close_metrics()
    finally:
        shed.cancel()
        await router.stop()
        telemetry.close()


async def run(options: argparse.Namespace) -> None:
    """Serve until a signal arrives or, with `--exit-with-parent`, stdin closes.

    Raises:
        StartupError: see `serve`.
    """
    loop = asyncio.get_running_loop()
    ending = ProcessEnd()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ending.signalled)
    if options.exit_with_parent:
        threading.Thread(target=_wait_for_parent, args=(loop, ending), name="parent-watch", daemon=True).start()
    await serve(options, ending)


class ProcessEnd:
    """How the process ends: `drain` alone drains it first, `now` ends it at once."""

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.now = asyncio.Event()

    def signalled(self) -> None:
        """Drain at the first signal; end at once at the next."""
        (self.now if self.drain.is_set() else self.drain).set()

    def at_once(self) -> None:
        """End without waiting for anything."""
        self.now.set()
        self.drain.set()

    async def unless_now(self, course: Coroutine[Any, Any, None]) -> None:
        """Run `course` to its end, but cancel it when the process is to end at once."""
        tasks = [asyncio.create_task(course), asyncio.create_task(self.now.wait())]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if tasks[0] in done:
            tasks[0].result()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the process and return its exit code."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    configure_logging(options.log_format, {"role": "router"}, rotates=options.exit_with_parent)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    raise_file_limit()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run(options))
    except BatonError as error:
        print(error.to_wire(), file=sys.stderr, flush=True)
        return EXIT_PRECONDITION
    return EXIT_OK


def _wait_for_parent(loop: asyncio.AbstractEventLoop, ending: ProcessEnd) -> None:
    while os.read(0, 4096):
        pass
    if not loop.is_closed():
        loop.call_soon_threadsafe(ending.at_once)


def _http_config(options: argparse.Namespace) -> HttpConfig | None:
    if options.http_port is None:
        return None
    return HttpConfig(
        port=options.http_port,
        template=ChatTemplate.load(options.model_path, options.chat_template, options.tool_call_parser),
        defaults=advised_sampling(options.model_path),
        allowed_origins=tuple(filter(None, map(str.strip, options.allowed_origins.split(",")))),
    )


def _telemetry(options: argparse.Namespace) -> TelemetryConfig:
    return TelemetryConfig(
        log_format=options.log_format,
        trace_file=options.trace_file,
        trace_endpoint=options.trace_endpoint,
        trace_share=options.trace_share,
    )


if __name__ == "__main__":
    sys.exit(main())
