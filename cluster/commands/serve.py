"""`baton serve`: starts a deployment, prints its addresses, and runs it until a signal ends it."""

import json
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, Self
from urllib.parse import urlsplit

from baton.cluster.checkpoint import require_servable
from baton.cluster.deployment import CHECK_INTERVAL_S, Deployment
from baton.cluster.outcome import ExitCode, Output
from baton.cluster.start_progress import show_progress
from baton.core.config import ServeConfig
from baton.core.telemetry.logs import configure_logging


def serve(config: ServeConfig, output: Output) -> ExitCode:
    """Serve until SIGINT or SIGTERM: the first lets open streams finish, a second ends them; both exit with 0.

    Raises:
        StartupError: a precondition does not hold, or a worker or the router failed.
        WorkerLost: a role has no worker left.
    """
    is_serving = False
    judgement = require_servable(config)
    for note in judgement.notes:
        output.note(f"baton: {note}")
    signals = Signals()
    if config.log_format == "json":
        output.log_format = config.log_format
        configure_logging(config.log_format, {"role": "cli"})
    try:
        with signals, show_progress(as_log=config.log_format == "json") as on_progress:
            with Deployment(config, on_progress=on_progress, on_log=_show_log) as deployment:
                is_serving = True
                signals.take()
                _announce(deployment, output, judgement.facts["names"][0])
                while not signals.is_asked:
                    deployment.wait(CHECK_INTERVAL_S, signals.wake)
                    deployment.check()
                output.note(
                    f"baton: takes nothing new; open streams may finish within {config.shutdown_grace_s:g} s "
                    "(press Ctrl-C again to end now)"
                )
                deployment.drain()
        output.note("baton: stopped")
        return ExitCode.OK
    except KeyboardInterrupt:
        output.note("baton: stopped" if is_serving else "baton: stopped before it served")
        return ExitCode.OK if is_serving else ExitCode.FAILED


def _show_log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # unchanged: JSON stays JSON


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
        f"serving {config.model} at {at}: {_crew(config)}\n"
        f"{_who_gets_in(deployment)}"
        f"{_curl(deployment, name)}"
        f"try: baton generate --address {deployment.address}{_access_flags(config)} --prompt 'def main():'",
    )


def _crew(config: ServeConfig) -> str:
    if config.prefill == 0:
        return f"{config.decode} decode, which compute the prompts, too"
    return f"{config.prefill} prefill, {config.decode} decode"


def _curl(deployment: Deployment, name: str) -> str:
    if not deployment.http_url:
        return ""
    config = deployment.config
    flags = ' -H "Authorization: Bearer $BATON_API_KEY"' if config.api_keys_file else ""
    flags += f" --cacert {config.tls_ca_file}" if config.tls.is_on and config.tls_ca_file else ""
    if config.tls.is_on and _client_ca_file(config):
        cert_file, key_file = _client_pair(config)
        flags += f" --cert {cert_file} --key {key_file}"
    body = shlex.quote(json.dumps({"model": name, "prompt": "def main():", "max_tokens": 32}))
    url, host = f"{deployment.http_url}/v1/completions", config.tls_server_name
    if config.tls.is_on and host:  # the certificate does not name the address
        at = urlsplit(url)
        url = f"https://{host}:{at.port}{at.path}"
        flags += f" --connect-to {host}:{at.port}:{at.netloc}"
    return f"try: curl {url}{flags} -H 'Content-Type: application/json' -d {body}\n"


def _access_flags(config: ServeConfig) -> str:
    """Flags that `baton generate` needs for access."""
    flags = f" --tls-ca-file {config.tls_ca_file}" if config.tls.is_on and config.tls_ca_file else ""
    if config.tls.is_on and _client_ca_file(config):
        cert_file, key_file = _client_pair(config)
        flags += f" --tls-cert-file {cert_file} --tls-key-file {key_file}"
    if config.tls.is_on and config.tls_server_name:
        flags += f" --tls-server-name {config.tls_server_name}"
    return flags + " --api-key-file KEY_FILE" * bool(config.api_keys_file)


def _client_ca_file(config: ServeConfig) -> str | None:
    """CA file for the certificates that clients must show, if any."""
    return config.tls_ca_file if config.admin_port is None else config.tls_client_ca_file


def _client_pair(config: ServeConfig) -> tuple[str | None, str | None]:
    """Files of a certificate for a client: this host's, if clients' certificates are of the same CA; else names."""
    if _client_ca_file(config) == config.tls_ca_file:
        return config.tls_cert_file, config.tls_key_file
    return "CLIENT_CERT_FILE", "CLIENT_KEY_FILE"


def _who_gets_in(deployment: Deployment) -> str:
    config = deployment.config
    if deployment.admin_address == deployment.address and not config.tls.is_on:
        return ""
    asks = ["TLS"] * config.tls.is_on
    asks += ["clients' certificates"] * bool(_client_ca_file(config)) + ["API keys"] * bool(config.api_keys_file)
    return f"clients need: {', '.join(asks) or 'nothing'}; operators come to {deployment.admin_address}\n"


class Signals:
    """Handles SIGTERM and SIGINT: before `take` they interrupt; after it the first only asks, and the next interrupts.

    Attributes:
        is_asked: whether the first one has come.
        wake: file descriptor that is readable from then on.
    """

    def __init__(self) -> None:
        self.is_asked = False
        self._is_taken = False
        self.wake, self._told = os.pipe()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._signalled) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self.wake)
        os.close(self._told)

    def take(self) -> None:
        """From now on, make the first signal request an orderly end instead of interrupting."""
        self._is_taken = True

    def _signalled(self, number: int, frame: object) -> None:
        if self.is_asked or not self._is_taken:
            raise KeyboardInterrupt
        self.is_asked = True
        os.write(self._told, b".")


@contextmanager
def terminable() -> Iterator[None]:
    """Make SIGTERM end the process like Ctrl-C: by unwinding every `with`."""

    def interrupt(number: int, frame: object) -> NoReturn:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
