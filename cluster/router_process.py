"""The router as a plain subprocess: never in the Ray driver, which dies a minute after it loses the head."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from baton.cluster.resolve import ModelDirectory
from baton.core.config import ServeConfig
from baton.core.errors import BatonError, MalformedMessage, WorkerStartFailed, from_wire
from baton.core.inside import ENVIRONMENT, DeploymentSecret
from baton.router.security_flags import flags_of

STOP_GRACE_S = 3.0
EXIT_PRECONDITION = 3  # its last line on stderr is then an error as `to_wire` writes it


def router_command(config: ServeConfig, model: ModelDirectory) -> list[str]:
    """How the router is started."""
    flags = {
        "host": config.host,
        "port": config.grpc_port,
        "model-name": model.name,
        "model-path": model.path,
        "weights": config.weights,
        "max-queue-len": config.max_queue_len,
        "routing": config.routing,
        "local-prefill": config.local_prefill,
        "canary-idle-s": config.canary_idle_s,
        "max-wait-s": config.max_wait_s,
        "request-timeout-s": config.request_timeout_s,
        "max-migrations": config.max_migrations if config.migration else 0,
        "migration-wait-s": config.migration_wait_s,
        "drain-grace-s": config.drain_grace_s,
        "quarantine-deaths": config.quarantine_deaths,
        "quarantine-s": config.quarantine_s,
        "log-format": config.log_format,
        "trace-file": config.telemetry_config().trace_file,
        "trace-endpoint": config.trace_endpoint,
        "trace-share": config.trace_share,
    }
    if config.http_port is not None:
        flags |= {"http-port": config.http_port, "chat-template": config.chat_template}
    if config.metrics_port is not None:
        flags["metrics-port"] = config.metrics_port
    pairs = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    return [sys.executable, "-P", "-m", "baton.router", *pairs, *flags_of(config), "--exit-with-parent"]


class RouterProcess:
    """One router. It ends with this process, whatever ends this process: its stdin closes then.

    Args:
        command: starts it.
        log_dir: of its files.
        secret: of the deployment; handed to it in its environment, which only its own account reads.
    """

    def __init__(self, command: Sequence[str], log_dir: Path, secret: DeploymentSecret) -> None:
        self._out_path = log_dir / "router.out"
        self._err_path = log_dir / "router.err"
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            ENVIRONMENT: secret.text,
        }
        with self._out_path.open("wb") as out, self._err_path.open("wb") as err:
            # A session of its own: Ctrl-C is for the driver, which then stops the router in order.
            self._process = subprocess.Popen(
                list(command), stdin=subprocess.PIPE, stdout=out, stderr=err, env=environment, start_new_session=True
            )

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def wait_port(self, timeout_s: float) -> int:
        """The gRPC port; see `wait_ports`."""
        return self.wait_ports(timeout_s)["grpc_port"]

    def wait_ports(self, timeout_s: float) -> dict[str, int]:
        """Its ports by name, as soon as the router says that it listens.

        Raises:
            BatonError: the router's own error, or WorkerStartFailed if it ended or stayed silent.
        """
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            line, newline, _ = self._out_path.read_text(encoding="utf-8", errors="replace").partition("\n")
            if newline:
                try:
                    ports = {str(name): int(port) for name, port in json.loads(line).items()}
                    return {"grpc_port": ports["grpc_port"]} | ports
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    raise WorkerStartFailed(f"the router printed {line[:200]!r}, not its port") from error
            self.check()
            time.sleep(0.02)
        raise WorkerStartFailed(
            "the router did not listen before the time to start (start_timeout_s) was over", timed_out=True
        )

    def check(self) -> None:
        """Check that it runs.

        Raises:
            BatonError: it ended and said why.
            WorkerStartFailed: it ended otherwise; the message holds its last words.
        """
        code = self._process.poll()
        if code is not None:
            raise self._last_words(code)

    def stop(self) -> None:
        """End it: asked first, killed after a grace."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_GRACE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait()

    def _last_words(self, code: int) -> BatonError:
        lines = self._err_path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        if code == EXIT_PRECONDITION and lines:
            try:
                return from_wire(lines[-1])
            except MalformedMessage:
                pass  # it died of something else
        last = "\n".join(lines[-5:]) or "it said nothing"
        return WorkerStartFailed(f"the router ended with code {code}: {last}", exit_code=code, worker_id="router")
