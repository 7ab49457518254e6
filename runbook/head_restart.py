#!/usr/bin/env -S python3 -P
"""Start Ray's head again under a deployment that serves on, and show that it has found every worker again."""

import argparse
import json
import math
import os
import socket
import ssl
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.config import LOOPBACK
from baton.core.errors import (
    ConfigInvalid,
    PreconditionUnmet,
    RayAccessRefused,
    RayVersionMismatch,
    StepFailed,
    from_wire,
)
from baton.runbook.common.canary import CanaryRuns
from baton.runbook.common.command import Runbook, main
from baton.runbook.common.site import Site
from baton.runbook.common.steps import Action, Check, Step, Verification, require

TABLE_S = 30.0
REDIS_S = 3.0
COMMAND_KILL_S = 5.0
SETTLE_S = 60.0
LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class Table:
    """What a head knows.

    Attributes:
        nodes: addresses of those that live.
        workers: state of each worker's actor, by worker id.
    """

    nodes: tuple[str, ...]
    workers: dict[str, str]


def ask_head(site: Site, address: str, worker_ids: set[str]) -> Table:
    """What it knows of its nodes, and of these workers.

    Raises:
        RayAccessRefused, RayVersionMismatch: it would not answer later either.
        StepFailed: it does not answer.
    """
    command = [sys.executable, "-P", "-m", "baton.cluster.ray.table", address]
    try:
        limit_s = max(1.0, min(TABLE_S, site.left_s))
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
        data = json.loads(done.stdout)
    except (subprocess.TimeoutExpired, ValueError) as error:
        raise StepFailed(f"Ray's head at {address} does not answer", address=address) from error
    if "error" in data:
        said = from_wire(data["error"])
        if isinstance(said, (RayAccessRefused, RayVersionMismatch)):
            raise said
        raise StepFailed(f"Ray's head at {address}: {said.message}", cause=type(said).__name__)
    # An actor is called baton-ID-WORKER; other deployments of the cluster have names of their own.
    workers = {
        worker_id: str(actor["state"])
        for actor in data["actors"]
        for worker_id in worker_ids
        if actor["name"].startswith("baton-") and actor["name"].endswith(f"-{worker_id}")
    }
    return Table(tuple(data["nodes"]), workers)


def redis_keys(address: str, password: str = "") -> int:
    """How many keys the Redis behind a head holds.

    Raises:
        PreconditionUnmet: it does not answer as a Redis does.
    """
    host, _, port = address.rpartition("://")[2].rpartition(":")
    words = (f"AUTH {password}\r\n" if password else "") + "DBSIZE\r\n"
    try:
        with _connected(host, int(port), address.startswith("rediss://")) as connection:
            connection.settimeout(REDIS_S)
            connection.sendall(words.encode())
            answer = b""
            while answer.count(b"\r\n") < words.count("\r\n") and (more := connection.recv(4096)):
                answer += more
        last = answer.decode(errors="replace").strip().splitlines()[-1]
        if not last.startswith(":"):
            raise PreconditionUnmet(f"the Redis at {address} says {last[:100]!r}", address=address)
        return int(last[1:])
    except (OSError, ValueError, IndexError) as error:
        raise PreconditionUnmet(f"no Redis answers at {address}: {error}", address=address) from error


def _connected(host: str, port: int, has_tls: bool) -> socket.socket:
    """To a Redis; with TLS it is shown the certificate that Ray's own variables name."""
    connection = socket.create_connection((host, port), timeout=REDIS_S)
    if not has_tls:
        return connection
    try:
        context = ssl.create_default_context(cafile=os.environ.get("RAY_REDIS_CA_CERT"))
        if "RAY_REDIS_CLIENT_CERT" in os.environ:
            context.load_cert_chain(os.environ["RAY_REDIS_CLIENT_CERT"], os.environ.get("RAY_REDIS_CLIENT_KEY"))
        return context.wrap_socket(connection, server_hostname=host)
    except BaseException:
        connection.close()
        raise


def carry_out(site: Site, command: str) -> str:
    """Run what the operator gave, in a shell, within the time that is left.

    Raises:
        StepFailed: it ended with another code than 0, or did not end.
    """
    process = subprocess.Popen(
        ["sh", "-c", command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=max(1.0, site.left_s))
    except subprocess.TimeoutExpired as error:
        process.terminate()
        try:
            process.communicate(timeout=COMMAND_KILL_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
        raise StepFailed(f"the command did not end in time: {command}") from error
    if process.returncode:
        raise StepFailed(f"the command ended with {process.returncode}: {said[-1000:]}", exit_code=process.returncode)
    return "the command ended with 0"


DEFAULT_RAY = "127.0.0.1:6379"
PASSWORD_VARIABLE = "BATON_REDIS_PASSWORD"


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ray-address", default=DEFAULT_RAY, help=f"HOST:PORT of the head  [{DEFAULT_RAY}]")
    parser.add_argument(
        "--command", default="", help="what starts it again: 'ray up -y --restart-only cluster.yaml'; required"
    )
    parser.add_argument(
        "--redis",
        default="",
        help="HOST:PORT of its Redis, or rediss://HOST:PORT with Ray's RAY_REDIS_CA_CERT, _CLIENT_CERT and "
        f"_CLIENT_KEY, to look at first; a password is in {PASSWORD_VARIABLE}",
    )
    parser.add_argument(
        "--settle-s",
        type=float,
        default=SETTLE_S,
        help="how long workers must then stay as they are: Ray's autoscaler may start Ray again on other hosts "
        f"some seconds after the head  [{SETTLE_S:g}]",
    )
    parser.add_argument("--force", action="store_true", help="even if the head answers")


class _HeadRestart:
    """What one run knows."""

    def __init__(self, site: Site, options: argparse.Namespace) -> None:
        if not options.command.strip():
            raise ConfigInvalid("give --command: what starts the head again")
        if not 0 <= options.settle_s < math.inf:
            raise ConfigInvalid(f"--settle-s {options.settle_s:g}: a time in seconds, 0 or more")
        self._site = site
        self._ray_address: str = options.ray_address
        self._command: str = options.command
        self._redis: str = options.redis
        self._settle_s: float = options.settle_s
        self._is_forced: bool = options.force
        self._canaries = CanaryRuns(site)
        self._incarnations: dict[str, int] = {}

    def steps(self) -> Sequence[Step]:
        """Look at what must go on, start the head, look again."""
        remembers = Check(
            name="what the head knew is in Redis",
            look=self._look_at_redis,
            next="without it a new head knows no worker: end the deployment, then start Ray and the deployment again",
        )
        return [
            Check(
                name="workers serve",
                look=self._note_incarnations,
                next="no answer is left to keep: start the head by hand; `baton serve` then starts the workers",
            ),
            Check(name="canaries are answered", look=self._ask, next="see `baton doctor --address`; mend that first"),
            Check(
                name="the head would take us",
                look=self._look_at_head,
                next="give Ray's own variables, as where the head is started (docs/operations.md)",
            ),
            *([remembers] if self._redis else []),
            Action(
                name="start Ray's head again",
                do=lambda: carry_out(self._site, self._command),
                is_done=lambda: not self._is_forced and self._is_up(),
                next="run the command by hand; the deployment serves on meanwhile, but no worker is started again",
            ),
            Verification(
                name="the head has found every worker again",
                look=self._wait_found,
                next="see `ray status` and the log of `baton serve`; a worker that Ray does not know is started again",
            ),
            Verification(
                name="no worker has changed its incarnation",
                look=self._same_incarnations,
                next="their streams went on at others; see the workers' logs for why they ended",
            ),
            Verification(
                name="canaries get the tokens expected", look=self._ask, next="run `baton runbook collect-diagnostics`"
            ),
        ]

    def _live(self) -> dict[str, int]:
        return {worker.state.worker_id: worker.state.epoch for worker in self._site.status().workers if worker.alive}

    def _note_incarnations(self) -> str:
        self._incarnations = self._live()
        roles = {worker.state.role for worker in self._site.status().workers if worker.alive}
        # Workers of the head's host ended with its Ray, perhaps all prefill workers: only a head brings them back.
        require("decode" in roles, "no decode worker is heard", role="decode")
        self._site.found["epochs"] = {name: f"{epoch:016x}" for name, epoch in self._incarnations.items()}
        return f"{len(self._incarnations)} workers are heard"

    def _look_at_redis(self) -> str:
        num_keys = redis_keys(self._redis, os.environ.get(PASSWORD_VARIABLE, ""))
        require(num_keys > 0, f"the Redis at {self._redis} holds nothing", address=self._redis)
        return f"{num_keys} keys at {self._redis}"

    def _ask(self) -> str:
        return f"{len(self._canaries.round())} canaries answered"

    def _look_at_head(self) -> str:
        """A head that is gone cannot say; without a token, or with what it refuses, waiting for it is in vain."""
        try:
            table = ask_head(self._site, self._ray_address, set())
        except StepFailed:
            return "it does not answer now"
        return f"it answers, with {len(table.nodes)} nodes"

    def _wait_found(self) -> str:
        def look() -> Table | None:
            try:
                table = ask_head(self._site, self._ray_address, set(self._incarnations))
            except StepFailed:
                return None
            is_found = all(table.workers.get(worker_id) == "ALIVE" for worker_id in self._incarnations)
            return table if is_found and self._is_whole(table) else None

        table = self._site.wait(look, f"the head at {self._ray_address} knows {', '.join(sorted(self._incarnations))}")
        self._site.found["nodes"] = list(table.nodes)
        return f"{len(table.workers)} workers on {len(table.nodes)} nodes"

    def _is_up(self) -> bool:
        try:
            return self._is_whole(ask_head(self._site, self._ray_address, set()))
        except StepFailed:
            return False

    def _is_whole(self, table: Table) -> bool:
        """Its table may answer where its node has not come up, and then no node can join there."""
        host = self._ray_address.rpartition(":")[0]
        return bool(table.nodes) if host in LOOPBACK else host in table.nodes

    def _same_incarnations(self) -> str:
        """Look again and again: what ends them comes some seconds after the head."""
        num_looks = 1 + math.ceil(self._settle_s / LOOK_S)
        for look in range(num_looks):
            if look:
                self._site.pause(LOOK_S)
            now = self._live()
            changed = sorted(name for name, epoch in self._incarnations.items() if now.get(name) != epoch)
            if changed:
                raise StepFailed(f"{', '.join(changed)} are in another incarnation, or silent", worker_ids=changed)
        return f"all in the incarnations they were in, for {self._settle_s:g} s"


RUNBOOK = Runbook(
    name="head-restart",
    about=__doc__ or "",
    steps=lambda site, options: _HeadRestart(site, options).steps(),
    options=_options,
)

if __name__ == "__main__":
    sys.exit(main(RUNBOOK))
