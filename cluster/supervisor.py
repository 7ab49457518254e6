"""`python -m baton.cluster.supervisor`: the Ray driver of a deployment in a cluster, in a process that may die.

A driver dies with the Ray of its host, and a minute after it has lost the head. The router must not die with it, so
`baton serve` runs both as separate children (`supervisor_process`). The supervisor starts the workers as detached
actors, or adopts those of the previous driver, follows changes of their desired number, and restarts workers that died.
On request it ends them. If stdin closes without that request, `baton serve` was killed: the workers then live on, and
the next driver adopts them.

Stdin's first line is the order, a JSON object. Stdout has one JSON object per line, and nothing else: what Ray prints
there (warnings, workers' output) is redirected to stderr.
"""

import contextlib
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from baton.client.access import Access
from baton.cluster.access import using
from baton.cluster.ray.actors import decode_rank_shell, decode_shell, prefill_rank_shell, prefill_shell
from baton.cluster.ray.crew import Crew, CrewPlan, CrewRoster
from baton.cluster.ray.session import RaySession
from baton.cluster.resolve import find_model, reachable_host, resolve_device
from baton.cluster.supervisor_process import STOP
from baton.core.config import ServeConfig
from baton.core.errors import BatonError, WorkerLost, WorkerStartFailed
from baton.core.inside import DeploymentSecret
from baton.core.telemetry.logs import configure_logging

CHECK_INTERVAL_S = 0.5
EXIT_SAID = 3  # its last line holds the error


class Supervisor:
    """One incarnation of the driver.

    Args:
        order: see `supervisor_process.Order`.
    """

    def __init__(self, order: dict[str, Any]) -> None:
        self._config = ServeConfig.from_mapping(order["config"])
        self._order = order
        self._beat_path = Path(order["beat_path"])
        self._over = threading.Event()
        self._is_ordered = False  # whether ending the workers was requested

    def run(self) -> None:
        """Run until stdin closes.

        Raises:
            BatonError: the workers could not be started, or a role has none left.
        """
        config, order = self._config, self._order
        threading.Thread(target=self._wait_for_end, daemon=True).start()
        roster = CrewRoster(**order["roster"]) if order["roster"] else None
        session = RaySession(
            order["ray_address"] or config.ray_address,
            namespace=order["name"],
            temp_dir=self._beat_path.parent,
            num_gpus=None,
        )
        host = reachable_host(config, session.num_nodes, session.node_ip) if roster is None else order["host"]
        say("session", host=host, ray_address=session.address)
        crew = Crew(session, self._plan(host))
        try:
            if roster is not None:
                say("adopted", workers=crew.adopt(roster))
            else:
                crew.start()
                say("roster", roster=crew.roster.as_data())
                deadline_s = time.monotonic() + order["start_timeout_s"]
                crew.wait_ready(deadline_s, lambda worker_id, ready: say("ready", worker=ready), self._check)
            say("roster", roster=crew.roster.as_data())
            say("serving")
            while not self._over.wait(CHECK_INTERVAL_S):
                self._beat()
                if crew.check():
                    say("roster", roster=crew.roster.as_data())
        except KeyboardInterrupt:
            pass
        except (WorkerStartFailed, WorkerLost):
            crew.end()
            raise
        if self._is_ordered:
            crew.end()
        session.close()

    def _plan(self, host: str) -> CrewPlan:
        config = self._config
        return CrewPlan(
            config=config,
            model=find_model(config.model, is_dummy=config.is_dummy),
            device=resolve_device(config.device),
            name=self._order["name"],
            router_address=f"{host}:{self._order['admin_port']}",
            secret=DeploymentSecret.of_text(self._order["secret"]),
            shells={"prefill": prefill_shell, "decode": decode_shell},
            rank_shells={"prefill": prefill_rank_shell, "decode": decode_rank_shell},
        )

    def _check(self) -> None:
        self._beat()
        if self._over.is_set():
            raise KeyboardInterrupt

    def _beat(self) -> None:
        """Show that this process is not stuck: the watching process sees the file's time change."""
        os.utime(self._beat_path)

    def _wait_for_end(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._is_ordered = STOP in sys.stdin.read()
        self._over.set()


_events = 1  # file descriptor for events


def say(event: str, **fields: Any) -> None:
    """Send one event line to the process that started this one."""
    os.write(_events, json.dumps({"event": event} | fields).encode() + b"\n")


def keep_stdout() -> None:
    """Reserve stdout for events: from now on, anything else that this process writes there goes to stderr."""
    global _events
    _events = os.dup(1)
    os.dup2(2, 1)


def main() -> int:
    """Carry out the order on stdin."""
    keep_stdout()
    order = json.loads(sys.stdin.readline())
    configure_logging(order["config"]["log_format"], {"role": "supervisor"})
    access = Access.of(order["tls"], order["api_key"])
    try:
        with using(access):
            Supervisor(order).run()
    except BatonError as error:
        say("failed", error=error.to_wire())
        return EXIT_SAID
    return 0


if __name__ == "__main__":
    # Ray's own threads may hang at exit when the head is gone.
    code = main()
    sys.stdout.flush()
    os._exit(code)
