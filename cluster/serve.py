"""`baton serve`: start a deployment, say where it is, and keep it until a signal ends it."""

import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from baton.cluster.checkpoint import require_servable
from baton.cluster.deployment import Deployment
from baton.cluster.outcome import ExitCode, Output
from baton.cluster.progress import show_progress
from baton.core.config import ServeConfig
from baton.core.logs import configure_logging

CHECK_INTERVAL_S = 0.5


def serve(config: ServeConfig, output: Output) -> ExitCode:
    """Serve until SIGINT or SIGTERM; both end it in order and with 0.

    Raises:
        StartupError: a precondition does not hold, or a worker or the router failed.
        WorkerLost: a role has no worker left.
    """
    is_serving = False
    judgement = require_servable(config)
    for note in judgement.notes:
        output.note(f"baton: {note}")
    if config.log_format == "json":
        output.log_format = config.log_format
        configure_logging(config.log_format, {"role": "cli"})
    try:
        with terminable(), show_progress(as_log=config.log_format == "json") as on_progress:
            with Deployment(config, on_progress=on_progress, on_log=_show_log) as deployment:
                is_serving = True
                _announce(deployment, output, judgement.facts["names"][0])
                while True:
                    time.sleep(CHECK_INTERVAL_S)
                    deployment.check()
    except KeyboardInterrupt:
        output.note("baton: stopped" if is_serving else "baton: stopped before it served")
        return ExitCode.OK if is_serving else ExitCode.FAILED


def _show_log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # as it is: JSON stays JSON


def _announce(deployment: Deployment, output: Output, name: str) -> None:
    config = deployment.config
    data: dict[str, Any] = {
        "address": deployment.address,
        "admin_address": deployment.admin_address,
        "pid": os.getpid(),
        "model": config.model,
        "workers": deployment.workers,
    }
    at = deployment.address
    if deployment.http_url:
        data["http_url"] = deployment.http_url
        at += f" and {deployment.http_url}/v1"
    if deployment.metrics_url:
        data["metrics_url"] = deployment.metrics_url
        at += f", metrics at {deployment.metrics_url}"
    output.emit(
        data,
        f"serving {config.model} at {at}: {config.prefill} prefill, {config.decode} decode\n"
        f"{_who_gets_in(deployment)}"
        f"{_curl(deployment, name)}"
        f"try: baton generate --address {deployment.address} --prompt 'def main():'",
    )


def _curl(deployment: Deployment, name: str) -> str:
    if not deployment.http_url:
        return ""
    config = deployment.config
    flags = ' -H "Authorization: Bearer $BATON_API_KEY"' if config.api_keys_file else ""
    flags += f" --cacert {config.tls_ca_file}" if config.tls.is_on and config.tls_ca_file else ""
    body = shlex.quote(json.dumps({"model": name, "prompt": "def main():", "max_tokens": 32}))
    url = f"{deployment.http_url}/v1/completions"
    return f"try: curl {url}{flags} -H 'Content-Type: application/json' -d {body}\n"


def _who_gets_in(deployment: Deployment) -> str:
    config = deployment.config
    if deployment.admin_address == deployment.address and not config.tls.is_on:
        return ""
    asks = ["TLS"] * config.tls.is_on
    ca_file = config.tls_ca_file if config.admin_port is None else config.tls_client_ca_file
    asks += ["clients' certificates"] * bool(ca_file) + ["API keys"] * bool(config.api_keys_file)
    return f"clients need: {', '.join(asks) or 'nothing'}; operators come to {deployment.admin_address}\n"


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM ends like Ctrl-C: through every `with` on the way out."""

    def interrupt(number: int, frame: object) -> NoReturn:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
