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
        "request-timeout-s": config.request_timeout_s,
    }
    pairs = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    return [sys.executable, "-P", "-m", "baton.router", *pairs, "--exit-with-parent"]


class RouterProcess:
    """One router. It ends with this process, whatever ends this process: its stdin closes then."""

    def __init__(self, command: Sequence[str], log_dir: Path) -> None:
        self._out_path = log_dir / "router.out"
        self._err_path = log_dir / "router.err"
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
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
        """The gRPC port, as soon as the router says that it listens.

        Raises:
            BatonError: the router's own error, or WorkerStartFailed if it ended or stayed silent.
        """
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            line, newline, _ = self._out_path.read_text(encoding="utf-8", errors="replace").partition("\n")
            if newline:
                try:
                    return int(json.loads(line)["grpc_port"])
                except (ValueError, KeyError, TypeError) as error:
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
