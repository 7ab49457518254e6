"""Ray's head, as a runbook sees it from outside: whether it answers, what it knows, and the Redis that remembers it."""

import json
import os
import socket
import ssl
import subprocess
import sys
from dataclasses import dataclass

from baton.core.errors import PreconditionUnmet, RayAccessRefused, RayVersionMismatch, StepFailed, from_wire
from baton.runbook.common.site import Site

TABLE_S = 30.0
REDIS_S = 3.0
COMMAND_KILL_S = 5.0


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
