"""Runs the router as a plain subprocess: not in the Ray driver, which dies a minute after it loses the head.

A router that dies is restarted at once, on the ports it had. Workers and their caches survive it, and tell the new
router the desired state. Streams that were open end; clients send their requests again.
"""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from baton.cluster.private_files import PRIVATE_UMASK, open_private
from baton.cluster.ray.restarts import Restarts
from baton.cluster.resolve import ModelDirectory, served_names
from baton.core.config import ServeConfig
from baton.core.errors import BatonError, MalformedMessage, RouterLost, WorkerStartFailed, from_wire
from baton.core.inside import ENVIRONMENT, DeploymentSecret
from baton.router.access.flags import flags_of

STOP_GRACE_S = 3.0
EXIT_PRECONDITION = 3  # the last line on stderr is then an error in `to_wire` form
MAX_STARTS: Final = 8  # restarts within the window; a router that needs more is given up
WINDOW_S: Final = 60.0
FIRST_WAIT_S: Final = 0.1
MAX_WAIT_S: Final = 5.0
STEADY_S: Final = (
    5.0  # a router that has listened for this long is in no crash loop, and its earlier deaths are forgotten
)

Ports = Mapping[str, int]

_logger = logging.getLogger(__name__)


def router_command(config: ServeConfig, model: ModelDirectory) -> list[str]:
    """Return the command that starts the router."""
    name, *aliases = served_names(config, model)
    own = ["--port", str(config.grpc_port), "--model-name", name, "--model-path", str(model.path)]
    own += [part for alias in aliases for part in ("--model-alias", alias)]
    keys = flags_of(config.model_copy(update={"trace_file": config.telemetry_config().trace_file}))
    return [sys.executable, "-P", "-m", "baton.router", *own, *keys, "--exit-with-parent"]


class RouterProcess:
    """One router, restarted as necessary. It ends whenever this process ends, because its stdin closes then.

    Args:
        command_of: builds the command, given the ports of the previous router; none the first time.
        log_dir: folder for its output.
        secret: secret of the deployment, passed in its environment, which only its own account can read.
        now_s: monotonic clock.
    """

    def __init__(
        self,
        command_of: Callable[[Ports], Sequence[str]],
        log_dir: Path,
        secret: DeploymentSecret,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._secret = secret
        self._command_of = command_of
        self._out_path = log_dir / "router.out"
        self._err_path = log_dir / "router.err"
        self._restarts = Restarts(
            now_s, max_starts=MAX_STARTS, window_s=WINDOW_S, first_wait_s=FIRST_WAIT_S, max_wait_s=MAX_WAIT_S
        )
        self._now_s = now_s
        self._ports: dict[str, int] = {}
        self._died_s: float | None = None  # time of a death after which it has not listened yet
        self._listens_s: float | None = None  # since when it listens again after a death
        self._is_draining = False
        self._err_at = 0  # offset of this incarnation's log
        self._process: subprocess.Popen[bytes] | None = self._spawn()

    @property
    def pid(self) -> int | None:
        """Process id; None while there is none."""
        return None if self._process is None else self._process.pid

    def wait_port(self, timeout_s: float) -> int:
        """Return the gRPC port; see `wait_ports`."""
        return self.wait_ports(timeout_s)["grpc_port"]

    def wait_ports(self, timeout_s: float) -> dict[str, int]:
        """Wait until the router reports that it listens, and return its ports by name.

        Raises:
            BatonError: the router's own error, or WorkerStartFailed if it ended or stayed silent.
        """
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            if self._hear():
                return dict(self._ports)
            self.check()
            time.sleep(0.02)
        raise WorkerStartFailed(
            "the router did not listen before the time to start (start_timeout_s) was over", timed_out=True
        )

    def check(self) -> None:
        """Restart the router if it has ended.

        Raises:
            BatonError: it ended before it ever listened, and gave a reason.
            WorkerStartFailed: likewise, without a reason; the message has its last lines.
            RouterLost: it ends more often than it may be restarted.
        """
        if self._process is None:
            if self._restarts.due() and not self._is_draining:
                self._process = self._spawn()
            return
        code = self._process.poll()
        if code is None:
            if self._died_s is not None and self._hear():
                _logger.warning("the router listens again, %.1f s after its end", self._now_s() - self._died_s)
                self._died_s, self._listens_s = None, self._now_s()
            elif self._listens_s is not None and self._now_s() - self._listens_s >= STEADY_S:
                self._restarts.forget("router")
                self._listens_s = None
            return
        if self._is_draining:
            return
        error = self._last_words(code)
        if not self._ports and not self._hear():
            raise error
        self._again(code, error)

    def _again(self, code: int, error: BatonError) -> None:
        assert self._process is not None
        self._listens_s = None
        if self._died_s is None:
            self._died_s = self._now_s()
        if not self._restarts.died("router"):
            message = f"the router ended {MAX_STARTS + 1} times within {WINDOW_S:.0f} s; the last time: {error.message}"
            raise RouterLost(message, exit_code=code, cause=type(error).__name__)
        _logger.warning("%s; workers live on, and it is started again", error.message)
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process = None

    def drain(self) -> None:
        """Tell it to accept nothing new, and to end when no stream is left, or after its grace period."""
        self._is_draining = True
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    @property
    def has_ended(self) -> bool:
        """Whether there is no process now."""
        return self._process is None or self._process.poll() is not None

    def stop(self) -> None:
        """End it now: terminate it, and kill it after a grace period."""
        if self._process is None:
            return
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            if self._process.poll() is None:
                self._process.terminate()
            self._process.wait(STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._process.wait()

    def _spawn(self) -> subprocess.Popen[bytes]:
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            ENVIRONMENT: self._secret.text,
        }
        with open_private(self._out_path, "wb") as out, open_private(self._err_path, "ab") as err:
            self._err_at = err.tell()
            # A session of its own, so that Ctrl-C reaches only the driver, which stops the router in order.
            return subprocess.Popen(
                list(self._command_of(self._ports)),
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=err,
                env=environment,
                start_new_session=True,
                umask=PRIVATE_UMASK,
            )

    def _hear(self) -> bool:
        """Return whether it has reported that it listens; its ports are known then."""
        line, newline, _ = self._out_path.read_text(encoding="utf-8", errors="replace").partition("\n")
        if not newline:
            return False
        try:
            ports = {str(name): int(port) for name, port in json.loads(line).items()}
            self._ports = {"grpc_port": ports["grpc_port"]} | ports
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise WorkerStartFailed(f"the router printed {line[:200]!r}, not its port") from error
        return True

    def _last_words(self, code: int) -> BatonError:
        lines = self._err_path.read_bytes()[self._err_at :].decode(errors="replace").strip().splitlines()
        if code == EXIT_PRECONDITION and lines:
            try:
                return from_wire(lines[-1])
            except MalformedMessage:
                pass  # it died for another reason
        last = "\n".join(lines[-5:]) or "it said nothing"
        if code < 0:  # its earlier output is unrelated
            name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
            return WorkerStartFailed(f"the router was ended by {name}", exit_code=code, worker_id="router")
        return WorkerStartFailed(f"the router ended with code {code}: {last}", exit_code=code, worker_id="router")
