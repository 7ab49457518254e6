"""Runs the supervisor of a deployment in a cluster as a child process: starts, monitors, restarts and ends it.

If the supervisor dies, no worker and no stream ends. Until the next one has adopted the workers, their number cannot
change and no worker is restarted. It is restarted without limit, with growing waits up to a bound.
"""

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from baton.client.access import Access
from baton.cluster.private_files import PRIVATE_UMASK, open_private
from baton.core.config import ServeConfig
from baton.core.errors import WorkerLost, WorkerStartFailed, from_wire
from baton.core.inside import DeploymentSecret

FIRST_WAIT_S: Final = 0.5
MAX_WAIT_S: Final = 5.0
STUCK_S: Final = 60.0  # without a heartbeat; a call to Ray may wait for a head that is gone
STOP_GRACE_S: Final = 15.0
RECONNECT_S: Final = 10  # a driver that has lost the head for this long dies, and the next one adopts its workers
POLL_S: Final = 0.05
STOP: Final = "stop"  # on stdin before it closes: end the workers, too

OnEvent = Callable[[dict[str, Any]], None]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a supervisor is told.

    Attributes:
        config: configuration of the deployment.
        name: name of the deployment, and of its namespace in Ray.
        access: access to the router.
        admin_port: admin port of the router.
        directory: directory of its files.
        secret: secret of the deployment.
    """

    config: ServeConfig
    name: str
    access: Access
    admin_port: int
    directory: Path
    secret: DeploymentSecret


class SupervisorProcess:
    """The supervisor of one deployment; `start` starts the first process.

    Attributes:
        host: host at which workers reach the router; empty until it is known.
        roster: workers, as the last supervisor reported them.
    """

    def __init__(self, order: Order, on_event: OnEvent) -> None:
        self._order = order
        self._on_event = on_event
        self.host = ""
        self._ray_address = ""
        self.roster: dict[str, Any] | None = None
        self._beat_path = order.directory / "supervisor.beat"
        self._beat_path.touch(mode=0o600)
        self._out_path = order.directory / "supervisor.out"
        self._err_path = order.directory / "supervisor.err"
        self._process: subprocess.Popen[bytes] | None = None
        self._read_bytes = 0
        self._is_serving = False
        self._num_failed = 0
        self._due_s = 0.0
        self._beat: tuple[int, float] = (0, 0.0)  # the file's modification time, and when this process saw it change

    @property
    def pid(self) -> int | None:
        """Process id; None while there is none."""
        return self._process.pid if self._process is not None else None

    def start(self, start_timeout_s: float) -> None:
        """Start a supervisor process; `wait_serving` waits for the outcome."""
        order = self._order
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "RAY_gcs_rpc_server_reconnect_timeout_s": str(RECONNECT_S),
        }
        with open_private(self._out_path, "wb") as out, open_private(self._err_path, "ab") as err:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "baton.cluster.supervisor"],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=err,
                env=environment,
                start_new_session=True,
                umask=PRIVATE_UMASK,
            )
        self._read_bytes = 0
        self._is_serving = False
        self._beat = (self._beat_path.stat().st_mtime_ns, time.monotonic())
        tls = order.access.tls
        message = {
            "config": order.config.model_dump(mode="json"),
            "name": order.name,
            "tls": {f"tls_{name}": getattr(tls, name) for name in ("cert_file", "key_file", "ca_file", "server_name")},
            "api_key": order.access.api_key,
            "secret": order.secret.text,
            "admin_port": order.admin_port,
            "beat_path": str(self._beat_path),
            "start_timeout_s": start_timeout_s,
            "host": self.host,
            "ray_address": self._ray_address,
            "roster": self.roster,
        }
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended; `check` finds out why

    def wait_serving(self, deadline_s: float, check: Callable[[], None]) -> None:
        """Wait until the first supervisor has started every worker.

        Raises:
            BatonError: the supervisor's own error, or WorkerStartFailed if it ended without one.
        """
        while not self._is_serving:
            self._hear()
            assert self._process is not None
            if self._process.poll() is not None:
                self._hear()
                raise WorkerStartFailed(f"the supervisor ended with code {self._process.returncode}: {self._last()}")
            check()
            if time.monotonic() > deadline_s:
                raise WorkerStartFailed(
                    f"not every worker was ready in time; the supervisor: {self._last()}", timed_out=True
                )
            time.sleep(POLL_S)

    def check(self) -> None:
        """Read its messages, and start another one if it has ended or is stuck.

        Raises:
            WorkerLost: a role has no worker left.
        """
        self._hear()
        now_s = time.monotonic()
        if self._process is None:
            if now_s >= self._due_s:
                self.start(self._order.config.start_timeout_s)
            return
        beat = self._beat_path.stat().st_mtime_ns
        if beat != self._beat[0]:
            self._beat = (beat, now_s)
        if self._process.poll() is None:
            if now_s < self._beat[1] + STUCK_S:
                return
            _logger.warning("the supervisor stands still, and is killed")
            self._process.kill()
            self._process.wait()
        self._hear()
        self._again()

    def _again(self) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.close()
        code = self._process.returncode
        self._num_failed = 0 if self._is_serving else self._num_failed + 1
        wait_s = min(MAX_WAIT_S, FIRST_WAIT_S * 2 ** min(self._num_failed, 10))
        log = _logger.warning if self._num_failed <= 1 else _logger.info
        log("the supervisor ended with code %s; workers serve on, another one is started", code)
        self._process = None
        self._due_s = time.monotonic() + wait_s

    def _hear(self) -> None:
        """Read its new messages, leaving an incomplete line for later."""
        with self._out_path.open("rb") as file:
            file.seek(self._read_bytes)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        for line in whole.splitlines():
            try:
                event = json.loads(line)
            except ValueError:  # output of some library must not end the deployment
                _logger.warning("the supervisor printed %r, which is no event", line[:200])
            else:
                self._take(event)

    def _take(self, event: dict[str, Any]) -> None:
        match event["event"]:
            case "session":
                self.host, self._ray_address = event["host"], event["ray_address"]
            case "roster":
                self.roster = event["roster"]
            case "serving":
                self._is_serving = True
            case "failed":
                error = from_wire(event["error"])
                if self.roster is None or isinstance(error, (WorkerLost, WorkerStartFailed)):
                    raise error
                _logger.info("the supervisor: %s", error.message)
        self._on_event(event)

    def stop(self) -> None:
        """Tell it to end the workers, and wait for its end."""
        if self._process is None:
            if self.roster is not None:
                _logger.error("Ray does not answer, so workers live on; `ray down` ends them")
            return
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{STOP}\n".encode())
            self._process.stdin.close()
        except BrokenPipeError:
            pass
        try:
            self._process.wait(STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            _logger.error("the supervisor does not end; workers may live on until `ray down`")
            self._process.kill()
            self._process.wait()
        self._process = None

    def _last(self) -> str:
        lines = self._err_path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return "\n".join(lines[-5:]) or "it said nothing"
