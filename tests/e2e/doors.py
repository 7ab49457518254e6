"""What listens in a deployment, under the names that docs/security.md declares, and a stranger's knock at all of it."""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil
import ray

from baton.tests.e2e import stranger

DOC = Path(__file__).parents[2] / "docs" / "security.md"
LOOPBACK = ("127.0.0.1", "::1", "::ffff:127.0.0.1")
REFUSALS = {"UNAUTHENTICATED", "PERMISSION_DENIED"}
NO_ANSWER = re.compile("^$|UNAUTHENTICATED|PERMISSION_DENIED|UNIMPLEMENTED|UNAVAILABLE| 40[0-9] ")
BY_COMMAND = {
    r"gcs_server$": ("`gcs_server`", "Ray's table"),
    r"raylet$": ("`raylet`", "Ray's node and object manager"),
    r"^ray::RuntimeEnvAgent": ("`ray::RuntimeEnvAgent`", "Ray's agent"),
    r"-m baton.kvtransfer.receiver.process": ("KV receiver process", "KV"),
    r"^ray::(Prefill|Decode)Actor": ("worker", "Ray's"),
    r"-m baton.cluster serve|bin/baton serve": ("`baton serve`", "Ray's driver"),
}


@dataclass(frozen=True)
class ListeningSocket:
    """One listening socket.

    Attributes:
        process, name: as the document's table has them.
        host, port: where it listens.
    """

    process: str
    name: str
    host: str
    port: int


def declared():
    """The document's table: (process, socket) to (bound to, without a credential)."""
    section = DOC.read_text().partition("## What listens\n")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    return {(row[0], row[1]): (row[2], row[3]) for row in rows[2:]}


def doors_of(pid, announced):
    """Every listening socket of `baton serve` and all it started, abstract ones too."""
    ports = {}
    for name, key in (("--grpc-port", "address"), ("--admin-port", "admin_address"), ("--http-port", "http_url")):
        if key in announced:
            ports.setdefault(int(announced[key].rpartition(":")[2].split("/")[0]), ("router", f"`{name}`"))
    if "metrics_url" in announced:
        port = int(re.search(r":(\d+)/metrics", announced["metrics_url"])[1])
        ports[port] = ("router", "`--metrics-port`")
    for worker in announced["workers"].values():
        ports[int(worker["address"].rpartition(":")[2])] = ("worker", "gRPC")
    found = []
    for process in tree(pid):
        command = " ".join(process.cmdline()).strip()
        for connection in process.net_connections(kind="inet"):
            if connection.status == psutil.CONN_LISTEN or (connection.type == 2 and not connection.raddr):
                port = connection.laddr.port
                process_name, name = ports.get(port) or name_of(command)
                found.append(ListeningSocket(process_name, name, connection.laddr.ip, port))
        for connection in process.net_connections(kind="unix"):
            if connection.laddr.startswith(("@", "\0")):
                found.append(ListeningSocket(command, connection.laddr, "", 0))
    return found


def tree(pid):
    """A process and all that descends from it."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def name_of(command):
    """By what a process was started as."""
    first = command.split(" --")[0]
    for pattern, name in BY_COMMAND.items():
        if re.search(pattern, first):
            return name
    return command, "of no known kind"


def assert_closed(pid, announced, paths=()):
    """Each door is declared, is where that says, and refuses a stranger if that says so. Returns what was found.

    Args:
        pid: of `baton serve`.
        announced: what it printed.
        paths: of files and folders that a stranger may not read.
    """
    table, doors = declared(), doors_of(pid, announced)
    assert doors
    for door in doors:
        assert (door.process, door.name) in table, f"{door} is not declared in docs/security.md"
        assert door.host in LOOPBACK, f"{door} is not on loopback"
    said = knocked([door.port for door in doors], paths, kv=[door.port for door in doors if door.name == "KV"])
    for door in doors:
        answers = said["doors"][str(door.port)]
        if table[door.process, door.name][1].startswith("refuses"):
            assert_refused(door, answers)
        if door.name == "KV":
            assert_keeps_kv_shut(door, said["kv"][str(door.port)])
        if table[door.process, door.name][1].endswith("certificate"):
            assert is_shut(answers), f"{door} is open to who has no certificate: {answers}"
    still = {(door.host, door.port) for door in doors_of(pid, announced)}
    assert not [door for door in doors if (door.host, door.port) not in still], "a stranger's knock ended a listener"
    if os.geteuid() == 0:
        for path, read in said["paths"].items():
            assert read == "PermissionError", f"a stranger reads {path}: {read}"
    return doors


def assert_refused(door, answers):
    """Some call was told that it lacks a credential, and none anything else; or all ended at the TLS handshake."""
    refused = [call for call, answer in answers.items() if answer in REFUSALS or " 401 " in answer]
    in_clear = {call: answer for call, answer in answers.items() if call != stranger.NO_CERTIFICATE}
    answered = {call: answer for call, answer in in_clear.items() if not NO_ANSWER.search(answer)}
    assert answers[stranger.NO_CERTIFICATE] != "answers", f"{door} takes a stranger without a certificate"
    assert (refused or is_shut(answers)) and not answered, f"{door} answers a stranger: {answered or answers}"


def assert_keeps_kv_shut(door, answers):
    """No transport got as far as a message."""
    assert set(answers.values()) == {""}, f"{door} takes a stranger's messages: {answers}"


def is_shut(answers):
    """It speaks TLS alone, and asks for a certificate: no call is read."""
    in_clear = {answer for call, answer in answers.items() if call != stranger.NO_CERTIFICATE}
    return answers[stranger.NO_CERTIFICATE] == stranger.SHUT and in_clear <= {"UNAVAILABLE", ""}


def knocked(ports, paths=(), *, host="127.0.0.1", kv=()):
    """What a stranger gets; `kv`: ports of the hand-off among them."""
    asked = {"ports": list(ports), "paths": [str(path) for path in paths], "methods": ray_methods()}
    asked |= {"host": host, "kv": list(kv)}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "baton.tests.e2e.stranger"],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@cache
def ray_methods():
    """Every gRPC method that Ray's programs name."""
    folder = Path(ray.__file__).parent
    programs = [
        *folder.glob("core/src/ray/*/*"),
        *folder.glob("core/generated/*_pb2_grpc.py"),
        Path(ray._raylet.__file__),
    ]
    texts = [path.read_bytes() for path in programs if path.is_file()]
    return sorted({name.decode() for text in texts for name in re.findall(rb"/ray\.rpc\.[A-Za-z.]+/[A-Za-z]+", text)})


def folder_of(pid):
    """The private folder of a deployment, found by what the router's standard error leads to."""
    for process in tree(pid):
        if "baton.router" in process.cmdline():
            return Path(os.readlink(f"/proc/{process.pid}/fd/2")).parent
    raise AssertionError("there is no router")
